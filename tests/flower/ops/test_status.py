"""`nufed federate status`: the server's view of a run, as text and as JSON."""

import json
import os
import time

import pytest

from flower.app.in_memory import plan_of
from flower.app.test_faults import FEDAVG
from nufed.errors import Fault, RunError, UpdateError
from nufed.flower.app.events import (
    EventLog,
    RoundRecorded,
    RoundTrained,
    SitesSeen,
    TrainingStarted,
)
from nufed.flower.ops.status import STALE, has_ended, newest_run, summary
from nufed.lab.runs.federation_records import STATUS, StatusRecord, read_status
from nufed.server import Progress


@pytest.fixture
def run(tmp_path):
    """A run with a site that was left out and one that never came."""
    folder = tmp_path / "runs" / "ours-001"
    folder.mkdir(parents=True)
    log = EventLog(plan_of(FEDAVG, rounds=5), "ours", folder)
    log.record(SitesSeen(frozenset([0, 1, 2]), {0: "Ward 0", 1: "Ward \x1b[2J1", 2: "Ward 2"}))
    log.record(TrainingStarted(Progress(0, {})))
    error = UpdateError(1, 1, "it failed: no samples", Fault.AT_SITE)
    log.record(RoundTrained(Progress(1, {}, cohort=(0, 1, 3), rejected=(error,), dropped=(3,))))
    log.record(RoundRecorded(1, {"released": 1.25, "server": 2.5}))
    return folder


def test_sites_round_and_reasons_are_shown(nufed, tmp_path, run):
    for where in ((), (run,)):  # the newest run by default
        shown = nufed("federate", "status", *where, cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert "ours: training, round 1 of 5, about 0 s left" in shown.stdout
        assert "3 of 4 sites connected" in shown.stdout
        assert "left out: 1 failed at the site, 1 offline" in shown.stdout
        assert "1.25 of the released model, 2.5 against the server" in shown.stdout
        assert "round 1: it failed: no samples" in shown.stdout
        assert "never" in shown.stdout and "\x1b" not in shown.stdout


def test_json_holds_the_same(nufed, tmp_path, run):
    shown = nufed("federate", "status", run, "--json", cwd=tmp_path)
    found = json.loads(shown.stdout)
    assert found.pop("gone") is False and found.pop("ended") is False
    status = StatusRecord.model_validate(found)
    assert status == StatusRecord.model_validate_json((run / STATUS).read_bytes())
    assert status.sites[1].last_left_out.reason == "it failed: no samples"


def test_a_server_that_was_killed_is_named(nufed, tmp_path, run):
    found = json.loads((run / STATUS).read_text())
    found["updated"] = time.time() - 2 * STALE
    (run / STATUS).write_text(json.dumps(found))
    shown = nufed("federate", "status", run, cwd=tmp_path)
    assert "stopped without an end" in shown.stdout and "about" not in shown.stdout
    assert json.loads(nufed("federate", "status", run, "--json", cwd=tmp_path).stdout)["gone"]


def test_sites_that_do_not_take_part_are_shown_with_the_reason(nufed, tmp_path, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    log = EventLog(plan_of(FEDAVG, rounds=5), "ours", run)
    reason = "it has not approved this app (digest ab)"
    log.record(
        SitesSeen(
            frozenset([0, 1]), {2: "Ward 2"}, connected=frozenset([2, 3]), excluded={3: reason}
        )
    )
    log.record(TrainingStarted(Progress(0, {})))
    shown = " ".join(nufed("federate", "status", run, cwd=tmp_path).stdout.split())
    assert "4 of 4 sites connected" in shown
    assert "yes, has not answered yet" in shown and f"yes, excluded: {reason}" in shown
    found = json.loads(nufed("federate", "status", run, "--json", cwd=tmp_path).stdout)
    assert [site["joined"] for site in found["sites"]] == [True, True, False, False]
    assert [site["excluded"] for site in found["sites"]] == [None, None, None, reason]


def test_it_says_that_a_run_waits_and_that_it_is_over(tmp_path):
    log = EventLog(plan_of(FEDAVG, rounds=5), "ours", tmp_path)
    waits, over = "no round has started", "this run is over; its sites are shown as they were"
    with log.running():
        assert waits in summary(log.status())[1]
        log.record(TrainingStarted(Progress(0, {})))
        assert not any(line.startswith((waits, over)) for line in summary(log.status()))
    assert summary(log.status())[1].startswith(over) and has_ended(log.status())
    with pytest.raises(RunError, match=r"the run has not started yet, or .*empty is not the run"):
        read_status(tmp_path / "empty")


def test_the_newest_run_is_found_and_none_is_named(nufed, tmp_path, run):
    older = run.with_name("ours-002")
    older.mkdir()
    (older / STATUS).write_bytes((run / STATUS).read_bytes())
    os.utime(older / STATUS, (0, 0))
    assert newest_run(tmp_path / "runs") == run
    shown = nufed("federate", "status", cwd=older)
    assert shown.returncode == 2 and "no run of a federation has started in" in shown.stderr
