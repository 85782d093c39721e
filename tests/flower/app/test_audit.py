"""The audit log: who joined, was asked, answered or was left out, and what was released."""

import json

import pytest

from flower.app.test_apps import AGENTS, TEXT, app_of, start
from flower.app.test_faults import is_training
from nufed.errors import RunError, TrainingError
from nufed.lab.files import sha256_of
from nufed.lab.runs.audit_log import audit
from support import Killed

pytestmark = pytest.mark.usefixtures("no_report")
ALL = TEXT.replace("participation = 0.75", "participation = 1.0").replace("unseen_agents = 1", "")
LATE = 3


def events(out, *names):
    return [event for event in audit(out / "audit.jsonl").events if event["event"] in names]


def late_in_round_2(agent, message, reply):
    late = agent == LATE and is_training(message) and message.content["about"]["round"] == 2
    return None if late else reply


def test_a_run_is_recorded_from_start_to_release(tmp_path):
    out = tmp_path / "run"
    start(app_of(tmp_path, ALL), tmp_path, out, late_in_round_2)
    found = audit(out / "audit.jsonl").events
    assert found[0]["event"] == "started" and found[0]["sites"] == AGENTS
    joined = [(event["site"], event["name"]) for event in events(out, "joined")]
    assert joined == [(number, str(number)) for number in range(AGENTS)]
    everyone, three = list(range(AGENTS)), [0, 1, 2]
    trained = [
        (event["event"], event["round"], event["sites"])
        for event in events(out, "asked", "answered", "left out", "aggregated")
        if event.get("what") in ("train", "updates", None)
    ]
    assert trained == [
        ("asked", 1, everyone),
        ("answered", 1, everyone),
        ("aggregated", 1, everyone),
        ("asked", 2, everyone),
        ("answered", 2, three),
        ("left out", 2, {"3": "it answered too late"}),
        ("aggregated", 2, three),
        ("asked", 3, everyone),
        ("answered", 3, everyone),
        ("aggregated", 3, everyone),
    ]
    sent = {event["vectors_sha256"] for event in events(out, "asked")}
    assert len(sent) == 4  # also the last model, for evaluation
    (model,) = out.glob("methods/*/seed-*/model.safetensors")
    released = found[-1]["released_sha256"]
    assert found[-1]["event"] == "finished"
    assert released[str(model.relative_to(out))] == sha256_of(model)
    head = f"the head of the audit log is {audit(out / 'audit.jsonl').head}"
    assert head in (out / "log.txt").read_text()


@pytest.mark.parametrize("torn", [False, True], ids=["between lines", "within a line"])
def test_the_log_continues_after_a_kill(tmp_path, torn):
    out, path = tmp_path / "run", tmp_path / "run" / "audit.jsonl"

    def kill(agent, message, reply):
        if is_training(message) and message.content["about"]["round"] == 2:
            raise Killed
        return reply

    with pytest.raises(Killed):
        start(app_of(tmp_path, ALL), tmp_path, out, kill)
    before = path.read_bytes()
    if torn:
        path.write_bytes(before[:-30])
    start(app_of(tmp_path, ALL), tmp_path, out)
    names = [event["event"] for event in audit(path).events]
    lines = before.count(b"\n")
    after = ["recovered", "resumed"] if torn else ["resumed"]
    assert names[lines - torn :][: len(after)] == after and names[-1] == "finished"
    assert names.count("aggregated") == 3


def test_a_run_that_fails_says_so_in_its_log(tmp_path):
    with pytest.raises(TrainingError, match="start the sites"):
        start(app_of(tmp_path, ALL), tmp_path, tmp_path / "run", sites=0)
    (failed,) = events(tmp_path / "run", "failed")
    assert "start the sites" in failed["reason"]
    assert audit(tmp_path / "run" / "audit.jsonl").head in (tmp_path / "run/log.txt").read_text()


def test_a_changed_log_is_not_continued(tmp_path, nufed):
    out, path = tmp_path / "run", tmp_path / "run" / "audit.jsonl"
    start(app_of(tmp_path, ALL), tmp_path, out, late_in_round_2)
    head = audit(path).head
    intact = nufed("federate", "audit", out, "--head", head, cwd=tmp_path)
    assert intact.returncode == 0 and f"the chain is intact; head: {head}" in intact.stdout
    lines = path.read_text().splitlines(keepends=True)
    left = next(i for i, line in enumerate(lines) if json.loads(line)["event"] == "left out")
    path.write_text("".join(lines[:left] + lines[left + 1 :]))
    found = nufed("federate", "audit", out, cwd=tmp_path)
    assert found.returncode == 2 and f"line {left + 1}: it does not follow" in found.stderr
    assert found.stderr.count("\n") == 1
    with pytest.raises(RunError, match=f"line {left + 1}: .*as evidence"):
        start(app_of(tmp_path, ALL), tmp_path, out)
