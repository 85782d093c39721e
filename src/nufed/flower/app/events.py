"""What happens in a federation's training, as events: one record for operators and auditors.

Everything that the server tells about its sites is derived from these events: the audit log, the
traffic (``traffic.jsonl``), and the status (``status.json``), which is folded from them, and from
which ``nufed federate status`` and the metrics for Prometheus are made. Nothing here changes what
is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event as Signal, RLock, Thread
from typing import Any, Literal, TypeAlias

from flwr.app import MessageType

from nufed.errors import RunError, UpdateError
from nufed.flower.app.payload import OFFLINE
from nufed.flower.app.plan import Plan
from nufed.lab.runs.audit_log import Audit, not_audited
from nufed.lab.runs.federation_records import (
    STATUS,
    TRAFFIC,
    RoundReason,
    SiteStatus,
    State,
    StatusRecord,
    TrafficLine,
    read_status,
)
from nufed.lab.runs.json_files import finite, write_json
from nufed.server import Progress

HEARTBEAT = 5.0  # seconds between writes of an unchanged status


class Event:
    """Anything that happens."""


@dataclass(frozen=True)
class MethodStarted(Event):
    """A method is trained next, and then ``later`` others."""

    plan: Plan
    later: int


@dataclass(frozen=True)
class TrainingStarted(Event):
    """Training starts or resumes from here."""

    progress: Progress


@dataclass(frozen=True)
class SitesSeen(Event):
    """The sites of these agents take part now; others are only connected, or excluded."""

    joined: frozenset[int]
    names: Mapping[int, str]
    connected: frozenset[int] = frozenset()
    excluded: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Joined(Event):
    """A site takes part, with this key."""

    site: int
    name: str
    key: str


@dataclass(frozen=True)
class Left(Event):
    """A site is offline."""

    site: int


@dataclass(frozen=True)
class Excluded(Event):
    """A node takes no part."""

    who: str
    reason: str


@dataclass(frozen=True)
class Asked(Event):
    """A request was sent to sites, with these vectors if any."""

    what: str
    round: int
    sites: list[int]
    vectors_sha256: str | None


@dataclass(frozen=True)
class Answered(Event):
    """Its deadline has passed, or all sites have answered: these."""

    what: str
    round: int
    sites: list[int]


@dataclass(frozen=True)
class LeftOut(Event):
    """Updates of an attempt at a round, or sites' scores of a model, are left out."""

    what: Literal["updates", "scores"]
    round: int
    errors: Sequence[UpdateError]


@dataclass(frozen=True)
class Aggregated(Event):
    """The updates of these sites are in the next model."""

    round: int
    sites: list[int]


@dataclass(frozen=True)
class RoundTrained(Event):
    """A round is trained, after all its attempts."""

    progress: Progress


@dataclass(frozen=True)
class RoundRecorded(Event):
    """A round is evaluated and recorded; ``epsilon`` is what has been spent so far."""

    round: int
    epsilon: Mapping[str, float] = field(default_factory=dict)


Recording: TypeAlias = Callable[[Event | TrafficLine], None]


def audited(event: Event | TrafficLine) -> tuple[str, dict[str, Any]] | None:
    """An event's name and fields in the audit log; None: it is not in there."""
    match event:
        case Joined() | Left() | Excluded() | Asked() | Answered() | Aggregated():
            kept = {key: value for key, value in vars(event).items() if value is not None}
            return type(event).__name__.lower(), kept
        case LeftOut(what, round, errors) if errors:
            reasons = {str(error.agent): error.reason for error in errors}
            return "left out", {"what": what, "round": round, "sites": reasons}
    return None


class EventLog:
    """Records events in files of ``folder`` and in an audit log; without a folder in memory.

    A run that resumes there continues its counts. A status or traffic that can't be written does
    not end the training: it is not needed for that. An audit log that can't be written does.
    """

    def __init__(
        self, plan: Plan, name: str = "", folder: Path | None = None, audit: Audit = not_audited
    ) -> None:
        self._plan, self._name, self._folder, self._audit = plan, name, folder, audit
        self._later = 0  # methods that are trained after this one
        self._first = 0  # the round that this process started from
        self._durations: list[float] = []  # seconds of the rounds of this process
        self._lock = RLock()
        self._began, self._written, now = time.monotonic(), 0.0, time.time()
        sites = [SiteStatus(number=n, name=str(n)) for n in range(plan.agents)]
        self._status = StatusRecord.model_validate(
            {"name": name, "state": "waiting for sites", "round": 0, "rounds": plan.rounds}
            | {"started": now, "updated": now, "sites": sites}
        )
        if folder is not None and (folder / STATUS).exists():
            with suppress(RunError):
                self._continue(read_status(folder))

    def _continue(self, before: StatusRecord) -> None:
        counts = ("round", "rounds_timed", "round_seconds", "bytes_down", "bytes_up", "left_out")
        self._update(**{key: getattr(before, key) for key in ("started", *counts)})
        for old in before.sites[: len(self._status.sites)]:
            kept = ("name", "last_seen", "left_out", "last_left_out")
            self._update_site(old.number, **{key: getattr(old, key) for key in kept})

    @contextmanager
    def running(self, then: State = "finished") -> Iterator[None]:
        """Keeps the status up to date while the server works; an exception is its failure."""
        stop = Signal()

        def beat() -> None:
            while not stop.wait(HEARTBEAT):
                self._write()

        heart = Thread(target=beat, daemon=True)
        heart.start()
        try:
            self._write()
            yield
        except BaseException as error:
            self._update(state="failed", failure=str(error) or type(error).__name__)
            raise
        else:
            self._update(state=then)
        finally:
            stop.set()
            heart.join()
            self._write()

    def record(self, event: Event | TrafficLine) -> None:
        """Record an event; a line of traffic is one: a site has answered, or its time is up."""
        if entry := audited(event):
            name, fields = entry
            method = {"method": self._plan.method} if self._plan.method else {}
            self._audit(name, **method, **fields)
        if isinstance(event, TrafficLine) and self._folder is not None:
            with suppress(OSError), (self._folder / TRAFFIC).open("a", encoding="utf-8") as file:
                file.write(event.model_dump_json() + "\n")
        with self._lock:
            urgent = self._fold(event)
        if urgent:
            self._write()

    def _fold(self, event: Event | TrafficLine) -> bool:
        """Update the status; returns whether it is written at once."""
        status, now = self._status, time.monotonic()
        match event:
            case MethodStarted():
                self._plan, self._later = event.plan, event.later
                self._update(state="waiting for sites", rounds=event.plan.rounds)
            case TrainingStarted():
                self._first, self._durations, self._began = event.progress.round, [], now
                self._update(state="training", round=event.progress.round)
                return True
            case SitesSeen():
                sites = [_seen(site, event) for site in status.sites]
                self._update(sites=sites)
                before = [(site.connected, site.joined, site.excluded) for site in status.sites]
                changed = before != [(s.connected, s.joined, s.excluded) for s in sites]
                return changed or time.time() - self._written > HEARTBEAT
            case Asked():
                evaluating = event.what.startswith(MessageType.EVALUATE)
                self._update(state="evaluating" if evaluating else "training")
                return True
            case TrafficLine():
                down, up = status.bytes_down + event.bytes_down, status.bytes_up + event.bytes_up
                self._update(bytes_down=down, bytes_up=up)
                if event.bytes_up:
                    self._update_site(event.agent, last_seen=time.time())
            case LeftOut(what="scores"):  # updates: when their round is trained
                self._leave_out(event.errors)
            case RoundTrained(progress):
                offline = [OFFLINE.error(agent, progress.round) for agent in progress.dropped]
                self._leave_out([*progress.rejected, *offline])
                self._update(round=progress.round)
            case RoundRecorded():
                seconds, self._began = now - self._began, now
                if event.round > self._first:
                    self._durations.append(seconds)
                    total = status.round_seconds + seconds
                    self._update(rounds_timed=status.rounds_timed + 1, round_seconds=total)
                self._update(epsilon=finite(dict(event.epsilon)))
                return True
        return False

    def _update(self, **fields: Any) -> None:
        with self._lock:
            self._status = self._status.model_copy(update=fields)

    def _update_site(self, number: int, **fields: Any) -> None:
        sites = list(self._status.sites)
        sites[number] = sites[number].model_copy(update=fields)
        self._update(sites=sites)

    def _leave_out(self, errors: Iterable[UpdateError]) -> None:
        for error in errors:
            kinds = self._status.left_out
            kind = error.fault.value
            self._update(left_out={**kinds, kind: kinds.get(kind, 0) + 1})
            if 0 <= error.agent < len(self._status.sites):
                last = RoundReason(round=error.round, reason=error.reason)
                left_out = self._status.sites[error.agent].left_out + 1
                self._update_site(error.agent, left_out=left_out, last_left_out=last)

    def status(self) -> StatusRecord:
        """The current status."""
        with self._lock:
            status, seconds, left = self._status, self._durations, None
            if seconds and status.state not in ("finished", "failed"):
                remaining = (1 + self._later) * self._plan.rounds - self._first - len(seconds)
                spent = time.monotonic() - self._began
                left = max(0.0, remaining * sum(seconds) / len(seconds) - spent)
            return StatusRecord.model_validate(
                {
                    **vars(status),
                    "name": ", ".join(filter(None, (self._name, self._plan.method))),
                    "updated": time.time(),
                    "last_seconds": seconds[-1] if seconds else None,
                    "seconds_left": left,
                    "left_out": dict(sorted(status.left_out.items())),
                }
            )

    def _write(self) -> None:
        if self._folder is None:
            return
        with self._lock, suppress(RunError):
            self._written = time.time()
            write_json(self._folder / STATUS, self.status().model_dump())


def _seen(site: SiteStatus, event: SitesSeen) -> SiteStatus:
    number = site.number
    connected = number in event.joined | event.connected
    return site.model_copy(
        update={
            "name": event.names.get(number, site.name),
            "connected": connected,
            "joined": number in event.joined,
            "excluded": event.excluded.get(number),
            "last_seen": time.time() if connected else site.last_seen,
        }
    )
