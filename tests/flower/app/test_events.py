"""The server's status and traffic: sites, rounds, what was left out and why, bytes and time."""

import json

import pytest
from flwr.app import Context, RecordDict

from flower.app.in_memory import MemoryGrid, agents_data, plan_of
from flower.app.test_apps import AGENTS, TEXT, app_of, start
from flower.app.test_faults import FEDAVG
from nufed.errors import RunError, TrainingError, UpdateError
from nufed.flower.app.events import (
    EventLog,
    LeftOut,
    RoundRecorded,
    RoundTrained,
    TrainingStarted,
)
from nufed.flower.app.payload import OFFLINE, content, size_of
from nufed.flower.app.replies import _failure
from nufed.lab.runs.federation_records import (
    STATUS,
    TRAFFIC,
    TrafficLine,
    read_status,
    read_traffic,
)
from nufed.server import TOO_LATE, Progress
from support import Killed

pytestmark = pytest.mark.usefixtures("no_report")
LATE = 1


def late(agent, message, reply):
    return None if agent == LATE and message.metadata.message_type == "train" else reply


def run_named(tmp_path, tamper=lambda agent, message, reply: reply, text=TEXT):
    app = app_of(tmp_path, text.replace("participation = 0.75", "participation = 1.0"))
    grid = MemoryGrid(app.site, (), tmp_path / "sites", tamper)
    for number in range(AGENTS):
        grid.add(number, name=f"Ward {number}")
    app.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(tmp_path / "run")}))


def test_the_status_names_sites_rounds_and_what_was_left_out(tmp_path):
    run_named(tmp_path, late)
    status = read_status(tmp_path / "run")
    assert (status.state, status.round, status.rounds) == ("finished", 3, 3)
    assert status.rounds_timed == 3 and status.round_seconds >= status.last_seconds > 0
    assert status.started <= status.updated and status.failure is None
    assert [site.name for site in status.sites] == [f"Ward {n}" for n in range(AGENTS)]
    assert all(site.connected and site.last_seen for site in status.sites)
    trained = [r for r in range(1, 4) if LATE in cohort(tmp_path / "run", r)]
    assert status.left_out == {"late": len(trained)} and trained
    site = status.sites[LATE]
    assert site.left_out == len(trained)
    assert (site.last_left_out.round, site.last_left_out.reason) == (trained[-1], TOO_LATE)


def cohort(run, round):
    (metrics,) = run.glob("methods/*/*/metrics.jsonl")
    return json.loads(metrics.read_text().splitlines()[round])["cohort"]


def test_traffic_is_the_size_of_the_messages(tmp_path):
    sizes = {}

    def weigh(agent, message, reply):
        about = message.content.get("about", {})
        if "round" in about:
            kind = message.metadata.message_type.partition(".")[0]
            one = sizes.setdefault((about["round"], kind, agent), [0, 0])
            one[0] += size_of(message.content)
            one[1] += size_of(reply.content)
        return reply

    run_named(tmp_path, weigh)
    found = {}
    for line in read_traffic(tmp_path / "run"):
        one = found.setdefault((line.round, line.phase, line.agent), [0, 0])
        one[0] += line.bytes_down
        one[1] += line.bytes_up
        assert line.seconds >= 0
    assert found == sizes
    status = read_status(tmp_path / "run")
    assert status.bytes_down == sum(down for down, _ in sizes.values())
    assert status.bytes_up == sum(up for _, up in sizes.values())
    plan = app_of(tmp_path).plan()
    assert size_of(content(plan.received_like())) > 4 * plan.objective.size


def test_a_failed_run_and_its_resumption(tmp_path):
    left = [9]

    def kill(agent, message, reply):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return late(agent, message, reply)

    with pytest.raises(Killed):
        run_named(tmp_path, kill)
    before = read_status(tmp_path / "run")
    assert before.state == "failed" and before.round < 3
    with (tmp_path / "run" / TRAFFIC).open("a") as file:
        file.write('{"round": 1, "pha')  # truncated by the kill
    run_named(tmp_path, late)
    after = read_status(tmp_path / "run")
    assert after.state == "finished" and after.started == before.started
    assert after.bytes_down > before.bytes_down and after.rounds_timed == 3
    (tmp_path / "other").mkdir()
    with pytest.raises(TrainingError):
        start(app_of(tmp_path, TEXT), tmp_path, tmp_path / "other" / "run", sites=0)
    failed = read_status(tmp_path / "other" / "run")
    assert failed.state == "failed" and "start the sites" in failed.failure
    assert not any(site.connected or site.last_seen for site in failed.sites)


def test_the_time_left_is_that_of_the_remaining_rounds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("nufed.flower.app.events.time.monotonic", lambda: now[0])
    log = EventLog(plan_of(FEDAVG, rounds=10))
    log.record(TrainingStarted(Progress(4, {})))
    now[0] = 50.0  # an evaluation of the model that training starts from
    log.record(RoundRecorded(4))
    assert log.status().seconds_left is None
    for round in (5, 6):
        now[0] += 8.0
        log.record(RoundTrained(Progress(round, {})))
        log.record(RoundRecorded(round))
    assert log.status().seconds_left == 4 * 8.0
    now[0] += 3.0
    assert log.status().seconds_left == 4 * 8.0 - 3.0


def test_epsilon_and_sites_without_a_valid_number():
    log = EventLog(plan_of(FEDAVG))
    log.record(
        LeftOut("scores", 1, (UpdateError(-1, 1, "its sender is not a valid agent number"),))
    )
    log.record(RoundRecorded(1, {"released": 1.5, "server": 3.0}))
    status = log.status()
    assert status.left_out == {"invalid": 1} and not any(s.left_out for s in status.sites)
    assert status.epsilon == {"released": 1.5, "server": 3.0}


@pytest.mark.parametrize("text", [OFFLINE.reason, TOO_LATE, "'model' is not finite"])
def test_a_site_cannot_choose_the_kind_of_its_failure(text):
    failure = _failure(f"<class 'builtins.ValueError'>:<'{text}'>")
    log = EventLog(plan_of(FEDAVG))
    log.record(LeftOut("scores", 1, (UpdateError(0, 1, failure.reason, failure.fault),)))
    assert log.status().left_out == {"failed at the site": 1}


def test_a_status_that_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(RunError, match="the run has not started yet, or"):
        read_status(tmp_path)
    (tmp_path / STATUS).write_text('{"round": -1}')
    with pytest.raises(RunError, match=r"status.json is invalid"):
        read_status(tmp_path)
    log = EventLog(plan_of(FEDAVG), "again", tmp_path)  # a run does not end because of it
    with log.running():
        pass
    assert read_status(tmp_path).state == "finished"


def test_a_log_that_can_not_be_written_does_not_end_the_run(tmp_path):
    plan, data = plan_of(FEDAVG), agents_data(1)
    log = EventLog(plan, "no", tmp_path / "nowhere")
    with log.running():
        sizes = {"bytes_down": 0, "bytes_up": size_of(content(samples=len(data)))}
        log.record(TrafficLine(round=1, phase="train", agent=0, seconds=0.1, **sizes))
    assert log.status().bytes_up > 0
