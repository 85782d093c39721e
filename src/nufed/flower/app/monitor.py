"""Records what the server sees of its sites, for ``nufed federate status``, metrics and the report.

Sites, rounds, time and traffic are written to files of the run directory
(:mod:`nufed.lab.runs.federation_records`). Nothing here changes what is trained.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, RLock, Thread
from types import MappingProxyType
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from nufed.errors import Fault, RunError, UpdateError
from nufed.flower.app.payload import NoReply, Reply
from nufed.flower.app.plan import Plan
from nufed.lab.runs.federation_records import (
    STATUS,
    TRAFFIC,
    Phase,
    SiteStatus,
    State,
    StatusRecord,
    TrafficLine,
    read_status,
)
from nufed.lab.runs.json_files import finite, write_json
from nufed.server import Progress

HEARTBEAT = 5.0  # seconds between writes of an unchanged status
OFFLINE = "its site is offline"


def size_of(content: RecordDict) -> int:
    """The bytes of a message's arrays, numbers and texts, without Flower's envelope."""
    counted = (ArrayRecord, ConfigRecord, MetricRecord)
    return sum(each.count_bytes() for each in content.values() if isinstance(each, counted))


@dataclass
class _Site:
    number: int
    name: str
    connected: bool = False
    joined: bool = False
    excluded: str | None = None
    last_seen: float | None = None
    left_out: int = 0
    last_left_out: dict[str, Any] | None = None

    @property
    def presence(self) -> tuple[bool, bool, str | None]:
        return self.connected, self.joined, self.excluded


class Monitor:
    """The server's view of its sites and rounds, written to ``folder``; None: nowhere.

    A run that resumes there continues its counts. A file that can't be written does not end the
    training: it is not needed for that.
    """

    def __init__(self, plan: Plan, name: str = "", folder: Path | None = None) -> None:
        self._plan, self._name, self._folder = plan, name, folder
        self._later = 0  # methods that are trained after this one
        self._lock = RLock()
        self._state: State = "waiting for sites"
        self._failure: str | None = None
        self._round, self._first, self._started = 0, 0, time.time()
        self._sites = [_Site(n, str(n)) for n in range(plan.agents)]
        self._left_out: Counter[str] = Counter()
        self._epsilon: dict[str, float] = {}
        self._counts = {"rounds_timed": 0, "round_seconds": 0.0, "bytes_down": 0, "bytes_up": 0}
        self._own_seconds: list[float] = []  # of the rounds of this process
        self._began, self._written = time.monotonic(), 0.0
        if folder is not None and (folder / STATUS).exists():
            with suppress(RunError):
                self._continue(read_status(folder))

    def _continue(self, before: StatusRecord) -> None:
        self._counts = {key: getattr(before, key) for key in self._counts}
        self._left_out.update(before.left_out)
        self._started, self._round = before.started, before.round
        for site, old in zip(self._sites, before.sites, strict=False):
            site.name, site.last_seen, site.left_out = old.name, old.last_seen, old.left_out
            site.last_left_out = old.last_left_out.model_dump() if old.last_left_out else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keeps the status up to date while the server trains; an exception is its failure."""
        stop = Event()

        def beat() -> None:
            while not stop.wait(HEARTBEAT):
                self._write()

        heart = Thread(target=beat, daemon=True)
        heart.start()
        try:
            self._write()
            yield
        except BaseException as error:
            self._state, self._failure = "failed", str(error) or type(error).__name__
            raise
        else:
            self._state = "finished"
        finally:
            stop.set()
            heart.join()
            self._write()

    def trains(self, plan: Plan, later: int) -> None:
        """A method is trained next, and then ``later`` others."""
        self._plan, self._later, self._state = plan, later, "waiting for sites"

    def begins(self, progress: Progress) -> None:
        """Training starts or resumes from here."""
        self._round = self._first = progress.round
        self._own_seconds = []
        self._state, self._began = "training", time.monotonic()
        self._write()

    def sees(
        self,
        joined: Iterable[int],
        names: Mapping[int, str],
        connected: Iterable[int] = (),
        excluded: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """The sites of these agents take part now; others are only connected, or excluded."""
        joined, now = set(joined), time.time()
        online = joined | set(connected)
        with self._lock:
            before = [site.presence for site in self._sites]
            for site in self._sites:
                site.name = names.get(site.number, site.name)
                site.connected, site.joined = site.number in online, site.number in joined
                site.excluded = excluded.get(site.number)
                if site.connected:
                    site.last_seen = now
            changed = before != [site.presence for site in self._sites]
        if changed or now - self._written > HEARTBEAT:
            self._write()

    def asks(self, phase: Phase) -> None:
        """Sites are asked to train or to evaluate."""
        self._state = "evaluating" if phase == "evaluate" else "training"
        self._write()

    def exchanged(
        self, phase: Phase, round: int, agent: int, sent: RecordDict, reply: Reply,
        seconds: float,
    ) -> None:  # fmt: skip
        """A site has answered a request, or its deadline has passed."""
        down, up = size_of(sent), 0 if isinstance(reply, NoReply) else size_of(reply)
        with self._lock:
            self._counts["bytes_down"] += down
            self._counts["bytes_up"] += up
            if not isinstance(reply, NoReply):
                self._sites[agent].last_seen = time.time()
        if self._folder is not None:
            line = TrafficLine(
                round=round, phase=phase, agent=agent, seconds=seconds, bytes_down=down, bytes_up=up
            )
            with suppress(OSError), (self._folder / TRAFFIC).open("a", encoding="utf-8") as file:
                file.write(line.model_dump_json() + "\n")

    def leaves_out(self, errors: Iterable[UpdateError]) -> None:
        """These agents' updates or scores are left out."""
        with self._lock:
            for error in errors:
                self._left_out[error.fault.value] += 1
                if 0 <= error.agent < len(self._sites):
                    site = self._sites[error.agent]
                    site.left_out += 1
                    site.last_left_out = {"round": error.round, "reason": error.reason}

    def closes(self, progress: Progress) -> None:
        """A round is trained; updates that it left out are recorded."""
        k = progress.round
        offline = [UpdateError(agent, k, OFFLINE, Fault.OFFLINE) for agent in progress.dropped]
        self.leaves_out([*progress.rejected, *offline])
        self._round = progress.round

    def records(self, progress: Progress, epsilon: Mapping[str, float] | None = None) -> None:
        """A round is trained, evaluated and recorded; ``epsilon`` is what it has spent so far."""
        now = time.monotonic()
        with self._lock:
            seconds, self._began = now - self._began, now
            if progress.round > self._first:
                self._own_seconds.append(seconds)
                self._counts["rounds_timed"] += 1
                self._counts["round_seconds"] += seconds
            self._epsilon = dict(epsilon or {})
        self._write()

    def status(self) -> StatusRecord:
        """The current status."""
        with self._lock:
            own, left = self._own_seconds, None
            if own and self._state not in ("finished", "failed"):
                remaining = (1 + self._later) * self._plan.rounds - self._first - len(own)
                spent = time.monotonic() - self._began
                left = max(0.0, remaining * sum(own) / len(own) - spent)
            return StatusRecord.model_validate(
                {
                    "name": ", ".join(filter(None, (self._name, self._plan.method))),
                    "state": self._state,
                    "round": self._round,
                    "rounds": self._plan.rounds,
                    "started": self._started,
                    "updated": time.time(),
                    "sites": [SiteStatus.model_validate(vars(site)) for site in self._sites],
                    **self._counts,
                    "last_seconds": own[-1] if own else None,
                    "seconds_left": left,
                    "left_out": dict(sorted(self._left_out.items())),
                    "epsilon": finite(self._epsilon),
                    "failure": self._failure,
                }
            )

    def _write(self) -> None:
        if self._folder is None:
            return
        with self._lock, suppress(RunError):
            self._written = time.time()
            write_json(self._folder / STATUS, self.status().model_dump())
