"""The audit log: every change of it is found, but for what only a noted head can show."""

import json

import pytest

from nufed.errors import RunError
from nufed.lab.runs.audit_log import AuditLog, audit


@pytest.fixture
def path(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write("started", run="abc")
    for round in range(1, 5):
        log.write("asked", round=round, sites=[0, 1])
    return tmp_path / "audit.jsonl"


def lines(path):
    return path.read_bytes().splitlines(keepends=True)


def test_a_log_verifies_and_continues_with_the_same_chain(path):
    before = audit(path)
    log = AuditLog(path)
    assert log.head == before.head
    log.write("finished", names=["läb", "two\nlines", "\u202e"])
    after = audit(path)
    assert after.hashes[:-1] == before.hashes and after.head == log.head
    assert [event["number"] for event in after.events] == list(range(1, 7))
    assert [event["event"] for event in after.events[::5]] == ["started", "finished"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("place", range(5))
def test_any_changed_byte_is_found_in_its_line(path, place):
    before = lines(path)
    for position in range(0, len(before[place]) - 1, 7):
        line = bytearray(before[place])
        line[position] ^= 1
        path.write_bytes(b"".join([*before[:place], bytes(line), *before[place + 1 :]]))
        with pytest.raises(RunError, match=f"line {place + 1}: "):
            audit(path)


def forge(path, place, **fields):
    """Change a line and give it a valid hash of its own."""
    before = lines(path)
    other = path.with_name("other")
    other.write_bytes(b"".join(before[:place]))
    log = AuditLog(other)
    record = json.loads(before[place])
    log.write(record["event"], **{**fields, "round": 9})
    path.write_bytes(b"".join([other.read_bytes(), *before[place + 1 :]]))


def test_a_changed_line_with_a_new_hash_breaks_the_next_one(path):
    forge(path, 2)
    with pytest.raises(RunError, match="line 4: it does not follow line 3"):
        audit(path)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: lines[1:], 1),
        (lambda lines: [*lines[:2], *lines[3:]], 3),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], 2),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], 3),
        (lambda lines: [*lines[:3], b"\n", *lines[3:]], 4),
        (lambda lines: [*lines, b"{}\n"], 6),
        (lambda lines: [*lines[:-1], lines[-1][:-9]], 5),
    ],
    ids=["first removed", "one removed", "swapped", "twice", "blank", "appended", "cut"],
)
def test_lines_that_are_removed_moved_or_added_are_found(path, change, line):
    path.write_bytes(b"".join(change(lines(path))))
    with pytest.raises(RunError, match=f"line {line}: "):
        audit(path)


def test_only_a_noted_head_shows_that_the_end_was_removed(path):
    head = audit(path).head
    AuditLog(path).write("finished")
    assert audit(path, head).events[-1]["event"] == "finished"
    path.write_bytes(b"".join(lines(path)[:-2]))
    audit(path)
    with pytest.raises(RunError, match="lines were removed at the end, or the log was rewritten"):
        audit(path, head)


@pytest.mark.parametrize("kept", range(1, 60, 6))
def test_a_crash_in_the_middle_of_a_line_is_recovered(path, kept):
    *before, last = lines(path)
    path.write_bytes(b"".join([*before, last[:kept]]))
    with pytest.raises(RunError, match="line 5: it is incomplete"):
        audit(path)
    AuditLog(path).write("resumed")
    found = audit(path)
    assert [event["event"] for event in found.events[-2:]] == ["recovered", "resumed"]
    assert found.events[4]["incomplete_line"] == last[:kept].decode()


def test_a_log_that_was_changed_is_not_continued(path):
    path.write_bytes(b"".join(lines(path)[1:]))
    with pytest.raises(RunError, match=r"line 1: .* move the log elsewhere as evidence"):
        AuditLog(path)


def test_a_log_whose_beginning_is_missing_is_named(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write("resumed")
    AuditLog(tmp_path / "audit.jsonl").write("finished")
    with pytest.raises(RunError, match="line 1: the log begins with 'resumed'"):
        audit(tmp_path / "audit.jsonl")
