"""Charts are drawn in a separate process, and a report is written without them if it dies."""

import json
import os
import subprocess
import sys

import pytest

import nufed
from nufed.errors import ReportWarning
from nufed.lab.report import figures
from nufed.lab.report.charts import bounds_charts
from nufed.lab.report.run_page import build_report
from nufed.lab.runs import load_run
from nufed.lab.runs.records import BoundsRecord, Stationarity
from processes import PATIENCE

pytestmark = pytest.mark.usefixtures("figures")

SMALL = {
    "name": "small",
    "rounds": 1,
    "workers": 1,
    "data": {"agents": 4, "samples_per_agent": 20},
    "method": {"adapt_steps": 1, "batch_size": 5},
    "methods": {"fo": {"algorithm": "gmeta", "curvature": "first_order"}},
    "baselines": ["majority"],
}
NAMES = {"results-seen", "rounds-seen", "training-loss", "training-update", "steps", "agents",
         "split"}  # fmt: skip
DRAWN = {"name": "steps", "svg": "<svg></svg>", "png": "UE5H"}
STEPS = f"print({json.dumps(json.dumps(DRAWN))}, flush=True)"
UNDER_A_LIMIT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from nufed.lab.cli import main
sys.argv[0] = "nufed"
main()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return nufed.run(SMALL, out=tmp_path_factory.mktemp("runs") / "small", figures=False)


@pytest.fixture
def drawing(monkeypatch, tmp_path):
    """Lets another script draw, as if nothing had been cached."""

    def use(text):
        script = tmp_path / "script.py"
        script.write_text(text)
        monkeypatch.setattr(figures, "SCRIPT", script)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    return use


def limited(*arguments, cwd):
    """The command line with 8 GB of address space, not enough for V8, and nothing cached."""
    command = [sys.executable, "-c", UNDER_A_LIMIT, *map(str, arguments)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cwd / "cache")}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)


def test_a_run_with_little_address_space_completes_without_charts(tmp_path):
    overrides = ["rounds=1", "seeds=[0]", "data.agents=4", "data.unseen_agents=0", "workers=1"]
    result = limited("run", "quickstart", *overrides, "--out", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "gmeta-hf " in result.stdout and "report: run/report.html" in result.stdout
    warnings = [line for line in result.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "charts could not be drawn" in warnings[0]
    assert "ulimit -v" in warnings[0] and "Traceback" not in result.stderr
    rows = json.loads((tmp_path / "run/results.json").read_text())["rows"]
    page = (tmp_path / "run/report.html").read_text()
    assert "gmeta-hf" in {row["name"] for row in rows} and "gmeta-hf" in page
    assert "This page lacks charts" in page and "vegaEmbed" not in page and "figures/" not in page
    assert not (tmp_path / "run/figures").exists()
    drawn = limited("data", "show", "quickstart", "--out", "split.svg", cwd=tmp_path)
    assert drawn.returncode == 2 and drawn.stderr.count("\n") == 1
    assert "split.svg was not written: charts could not be drawn" in drawn.stderr


def test_figures_can_be_switched_off(run, tmp_path, nufed):
    assert not (run.path / "figures").exists()
    page = (run.path / "report.html").read_text()
    assert "vegaEmbed(" in page and "figures/" not in page and "lacks charts" not in page
    build_report([run], tmp_path / "drawn")
    files = {path.name for path in (tmp_path / "drawn/figures").iterdir()}
    assert files == {f"{name}.{kind}" for name in NAMES for kind in ("svg", "png")}
    with_links = (tmp_path / "drawn/report.html").read_text()
    assert all(f'href="figures/{file}"' in with_links for file in files)
    again = nufed("report", run.path, "--out", "again", "--no-figures", cwd=tmp_path)
    assert again.returncode == 0 and (tmp_path / "again/report.html").read_text() == page
    assert not (tmp_path / "again/figures").exists()


def test_the_command_run_takes_no_figures(tmp_path, nufed):
    overrides = ["rounds=1", "seeds=[0]", "data.agents=4", "data.unseen_agents=0", "workers=1"]
    result = nufed("run", "quickstart", *overrides, "--out", "run", "--no-figures", cwd=tmp_path)
    assert result.returncode == 0 and "warning" not in result.stderr
    assert not (tmp_path / "run/figures").exists() and (tmp_path / "run/report.html").exists()


def test_a_quick_run_has_neither_baselines_nor_charts(tmp_path, nufed, drawing):
    drawing("raise SystemExit('nothing is to be drawn')")
    overrides = ["rounds=1", "seeds=[0]", "data.agents=4", "data.unseen_agents=0", "workers=1"]
    result = nufed("run", "quickstart", *overrides, "--out", "run", "--quick", cwd=tmp_path)
    assert result.returncode == 0 and "warning" not in result.stderr
    assert not (tmp_path / "run/figures").exists() and not (tmp_path / "run/baselines").exists()
    page = (tmp_path / "run/report.html").read_text()
    assert "<td>gmeta-hf</td>" in page and "<figure>" not in page and "lacks charts" not in page
    assert "made without charts: `nufed report` draws them" in page
    refused = nufed("run", "--resume", "run", "--quick", cwd=tmp_path)
    assert refused.returncode == 2 and "--quick is for a new run" in refused.stderr


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("raise SystemExit('no such mark')", "(no such mark)"),
        ("raise SystemExit(3)", "(no reason given)"),
        ("import time; time.sleep(1000)", "within 1 seconds"),
        ("print('{', end='', flush=True); raise ValueError('cut')", "(ValueError: cut)"),
    ],
)
def test_if_the_drawing_process_fails_the_page_has_the_charts_drawn_so_far(
    run, tmp_path, drawing, monkeypatch, end, reason
):
    monkeypatch.setattr(figures, "TIMEOUT", 1 if "sleep" in end else PATIENCE)
    drawing(f"{STEPS}\n{end}")
    with pytest.warns(ReportWarning) as warned:
        build_report([run], tmp_path / "out")
    assert len(warned) == 1 and reason in str(warned[0].message)
    page = (tmp_path / "out/report.html").read_text()
    assert "This page lacks charts" in page and reason in page and "majority" in page
    if reason != "within 1 seconds":  # a slow machine may not have drawn any
        assert "figures/steps.svg" in page and "figures/agents.svg" not in page
        assert (tmp_path / "out/figures/steps.png").read_bytes() == b"PNG"


def test_a_process_that_cannot_be_started_is_named(run, tmp_path, drawing, monkeypatch):
    drawing("")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.warns(ReportWarning, match="no process can be started: No such file"):
        build_report([run], tmp_path)


def test_charts_of_bounds_are_left_out_with_a_warning(tmp_path, drawing):
    drawing("raise SystemExit('no such mark')")
    bounds = BoundsRecord(
        constants={},
        smooth=True,
        uniform=True,
        by_steps_of="fo",
        by_steps=[],
        methods=[],
        stationarity=[Stationarity(method="fo", round=0, value=1.0)],
    )
    with pytest.warns(ReportWarning, match="no such mark"):
        assert figures.save_figures(bounds_charts(bounds), tmp_path) == []


def test_the_javascript_is_bundled_once_and_again_if_its_cache_is_damaged(run, tmp_path, drawing):
    count = tmp_path / "count"
    drawing(
        "import json, sys\n"
        "asked = json.load(sys.stdin)['javascript']\n"
        f"open({str(count)!r}, 'a').write(f'{{asked}} ')\n"
        "if asked: print(json.dumps({'javascript': 'const vega = 1'}))"
    )

    def bundled():
        build_report([load_run(run.path)], tmp_path / "out")
        assert "const vega = 1" in (tmp_path / "out/report.html").read_text()
        asked = sorted(count.read_text().split())
        count.unlink()
        return asked

    assert bundled() == ["False", "True"] and bundled() == ["False"]
    (cached,) = (tmp_path / "cache/nufed").iterdir()
    cached.write_bytes(cached.read_bytes().replace(b"vega = 1", b"vega = 2"))
    assert bundled() == ["False", "True"] and bundled() == ["False"]


def test_a_cache_that_cannot_be_written_is_none(run, tmp_path, drawing):
    drawing("import json; print(json.dumps({'javascript': 'const vega = 1'}))")
    (tmp_path / "cache").write_text("not a directory")
    build_report([run], tmp_path / "out", figures=False)
    assert "const vega = 1" in (tmp_path / "out/report.html").read_text()


def test_the_cached_javascript_is_what_was_bundled(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bundled, cached = (figures.draw({}, javascript=True).javascript for _ in range(2))
    assert bundled == cached and "vegaEmbed" in bundled
