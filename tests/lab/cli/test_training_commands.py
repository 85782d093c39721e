"""``nufed sweep`` as a user sees it."""

import json
import os
import signal

import pytest

from nufed.lab.cli.progress import SweepDisplay
from support import without_report

SMALL = ["rounds=2", "seeds=[0]", "data.agents=6", "data.unseen_agents=1", "baselines=[]"]
FAST = ["methods={fedavg={},gmeta={curvature='first_order'}}", "workers=1"]
SWEEP = ["sweep", "quickstart", *SMALL, *FAST, "data.dirichlet=0.3,3", "--no-figures"]


@pytest.fixture(autouse=True)
def _without_reports_of_runs():
    with without_report():
        yield


def test_it_prints_a_table_progress_and_paths(nufed, tmp_path):
    result = nufed(*SWEEP, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert "2 runs over data.dirichlet, 1 seed each" in lines[0]
    assert "agents seen in training" in lines and "agents unseen in training" in lines
    assert sum(line.split()[:3] == ["dirichlet", "fedavg", "gmeta"] for line in lines) == 2
    assert sum(line.startswith("0.3 ") for line in lines) == 2
    assert lines[-1] == "report: runs/quickstart-sweep-001/report.html"
    assert "4 parts of 2 runs to train" in result.stderr
    assert "02-dirichlet-3  seed 0  gmeta  round 2/2" in result.stderr and "left" in result.stderr
    again = nufed("sweep", "--resume", "runs/quickstart-sweep-001", "--json", cwd=tmp_path)
    found = json.loads(again.stdout)
    assert [run["values"] for run in found["runs"]] == [{"data.dirichlet": d} for d in (0.3, 3)]
    assert "0 parts of 0 runs to train" in again.stderr


def test_ctrl_c_says_how_to_resume(nufed, tmp_path, monkeypatch):
    update = SweepDisplay.update

    def interrupt(display, run, event):
        update(display, run, event)
        if event.round == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(SweepDisplay, "update", interrupt)
    result = nufed(*SWEEP, "--out", "my sweep", cwd=tmp_path)
    assert result.returncode == 130
    assert "stopped; resume with: nufed sweep --resume 'my sweep'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep"], "give a preset (see `nufed list`) or a TOML file, or --resume SWEEP"),
        (["sweep", "quickstart"], "no key is swept"),
        ([*SWEEP, "rounds=1..90"], "180 runs (2 of data.dirichlet × 90 of rounds)"),
        (["sweep", "--resume", "nowhere"], "nowhere is not the directory of a sweep"),
    ],
)
def test_bad_input_is_one_sentence(nufed, tmp_path, arguments, message):
    result = nufed(*arguments, cwd=tmp_path)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert message in result.stderr and not any(tmp_path.iterdir())
