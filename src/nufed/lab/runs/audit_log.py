"""The audit log of a federation: one JSON object per line, chained by hashes, only appended to.

Every line holds its ``number``, its ``time`` (UTC), an ``event``, the hash of the line before as
``previous`` (64 zeros in the first) and its own hash: the SHA-256 of the JSON text without it. So a
line that is changed, inserted, removed or moved breaks the chain there. The hash of the last line
is the log's **head**: whoever has noted it elsewhere can also tell that lines at the end were
removed, or the log rewritten, which the log alone can't show.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from nufed.errors import RunError, shown, visible
from nufed.lab.files import cannot_write, sha256, sync

AUDIT = "audit.jsonl"
START = "0" * 64
HASH = b', "sha256": "%s"}'  # the end of a line
FIRST = ("started", "registered")  # what the log of a run and that of a registry begin with


class Audit(Protocol):
    """Writes an event with its fields to an audit log."""

    def __call__(self, event: str, **fields: Any) -> None: ...


def not_audited(event: str, **fields: Any) -> None:
    """Where there is no audit log."""


@dataclass(frozen=True)
class Audited:
    """A verified log: its events, and the hash of every line."""

    events: list[dict[str, Any]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return self.hashes[-1] if self.hashes else START


class AuditLog:
    """Appends events to a log, each durably; continues one that exists.

    An incomplete last line, left by a crash while it was written, is replaced by an event
    ``recovered`` that quotes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            content = path.read_bytes() if path.exists() else b""
            whole, end, torn = content.rpartition(b"\n")
            log = _continued(whole + end, path)
            self._number, self.head = len(log.events), log.head
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "r+b") as file:  # noqa: PTH123
                file.truncate(len(whole + end))
                os.fsync(file.fileno())
            sync(path.parent)
        except OSError as error:
            raise cannot_write(path, error) from error
        if torn:
            self.write("recovered", incomplete_line=visible(torn.decode("utf-8", "replace")))

    def write(self, event: str, **fields: Any) -> None:
        """Append an event; it is on disk when this returns."""
        record = {
            "number": self._number + 1,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": event,
            **fields,
            "previous": self.head,
        }
        text = json.dumps(record).encode()
        head = sha256(text)
        try:
            with self._path.open("ab") as file:
                file.write(text[:-1] + HASH % head.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self._path, error) from error
        self._number, self.head = self._number + 1, head


def _continued(content: bytes, path: Path) -> Audited:
    try:
        return verified(content, path)
    except RunError as error:
        raise RunError(f"{error}; move the log elsewhere as evidence, then resume") from None


def audit(path: Path, head: str | None = None) -> Audited:
    """Verify a log, also that it still contains the line with the hash ``head``."""
    try:
        log = verified(path.read_bytes(), path)
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}") from None
    if log.events and log.events[0]["event"] not in FIRST:
        first = shown(log.events[0]["event"])
        raise RunError(f"{path}, line 1: the log begins with {first}: earlier lines are missing")
    if head is not None and head not in log.hashes:
        raise RunError(
            f"{path}: no line has the hash {shown(head)}: lines were removed at the end, or the "
            "log was rewritten"
        )
    return log


def verified(content: bytes, path: Path) -> Audited:
    """The log with this content; raises an error that names the first broken line."""
    log = Audited()
    *lines, rest = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        reason = _broken(line, number, log.head)
        if reason:
            raise RunError(f"{path}, line {number}: {reason}")
        log.events.append(json.loads(line))
        log.hashes.append(log.events[-1]["sha256"])
    if rest:
        raise RunError(
            f"{path}, line {len(lines) + 1}: it is incomplete: the server stopped while writing "
            "it (resuming the run repairs this), or it was cut off"
        )
    return log


def _broken(line: bytes, number: int, previous: str) -> str:
    """Why a line is broken; empty if it is not."""
    size = len(HASH % START.encode())
    text, end = line[:-size] + b"}", line[-size:]
    if end != HASH % sha256(text).encode():
        return "it was changed: it does not match its own hash"
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        return "it is not an event"
    if (record.get("number"), record.get("previous")) != (number, previous):
        return f"it does not follow line {number - 1}: that one was changed, or lines are missing"
    return ""
