"""Runs jobs one by one, in worker processes, or on the nodes of a cluster.

Nodes need not share a file system with this machine. A job starts on a node from the files that
this machine has of it. Whenever it has saved a checkpoint, and at its end, the files that it
changed are sent and written here. So a job whose node is lost resumes elsewhere from that
checkpoint, and so does a run whose driver was killed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

from nufed.lab.experiment.observers import Event, Listener
from nufed.lab.experiment.session import Stop
from nufed.lab.experiment.setup import Setup
from nufed.lab.files import TEMPORARY, cannot_write, make_private, write_durably
from nufed.lab.runs import RunDirectory
from nufed.lab.runs.part_files import PartFiles
from nufed.simulation import RayCluster, Workers

BASELINE_PART = "null baselines"


@dataclass(frozen=True)
class RunPart:
    """One method (or the null baselines) with one seed, and an estimate of its work."""

    seed: int
    method: str
    work: float

    def __str__(self) -> str:
        return f"{self.method} with seed {self.seed}"


@dataclass(frozen=True)
class Job(ABC):
    """A part of a run as a function with its data: the run's setup and its directory.

    It runs in this process, a worker process or on a node of a cluster.
    """

    setup: Setup
    directory: RunDirectory
    part: RunPart

    @abstractmethod
    def __call__(self, listener: Listener, workers: int, stop: Stop) -> None:
        """Run what is left in ``workers`` processes; after a stop, save a checkpoint and return."""

    @abstractmethod
    def files(self) -> dict[str, PartFiles]:
        """Its files by the name of the method, or of each null baseline."""

    def __str__(self) -> str:
        return str(self.part)

    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        config = self.setup.config
        return all(files.is_done(config.rounds_of(name)) for name, files in self.files().items())


JobT = TypeVar("JobT", bound=Job)


@dataclass(frozen=True)
class _Spread(Generic[JobT]):
    """Jobs that run concurrently, identified by number, and the listener of their events."""

    jobs: Sequence[JobT]
    listener: Callable[[JobT, Event], None]
    stop: Stop

    def longest_first(self) -> list[int]:
        return sorted(range(len(self.jobs)), key=lambda number: -self.jobs[number].part.work)

    def describe(self, number: int, last: Any) -> str:
        """A job, with the round of its last event."""
        job = self.jobs[number]
        return f"{job}, after round {last[1].round}" if last else str(job)

    def can_abandon(self, busy: list[int]) -> bool:
        """After a stop, null baselines are abandoned: they save no checkpoints."""
        return self.stop() and all(self.jobs[n].part.method == BASELINE_PART for n in busy)


def run_jobs(
    jobs: Sequence[JobT], workers: int, listener: Callable[[JobT, Event], None], stop: Stop
) -> None:
    """Run all jobs: several at the same time if there are several workers, else one by one.

    The number of workers changes no bit. After a signal that ``stop`` handles, running jobs save a
    checkpoint and the others are not started. On a cluster, jobs go to its nodes; one alone,
    or fewer than half of its slots, run one by one, and the agents of each are spread. On a device
    other than the CPU agents are never spread.
    """
    cluster = jobs[0].setup.cluster if jobs else None
    if cluster is not None:
        left = [job for job in jobs if not job.is_done()]
        if len(left) > 1 and 2 * len(left) >= cluster.slots:
            _run_on_nodes(_Spread(left, listener, stop), cluster)
            jobs = [job for job in jobs if not any(job is other for other in left)]
    elif workers > 1 and len(jobs) > 1:
        _run_in_processes(_Spread(jobs, listener, stop), workers)
        return
    for job in jobs:
        if not stop():
            job(partial(listener, job), workers if job.setup.config.device == "cpu" else 1, stop)


@dataclass(frozen=True)
class _ProcessWork:
    """The work of a worker process: run the job with a number."""

    jobs: Sequence[Job]
    workers: int  # of each process
    stop: Stop

    def __call__(self, number: int, notify: Callable[[tuple[int, Event]], None]) -> None:
        if not self.stop():
            self.jobs[number](lambda event: notify((number, event)), self.workers, self.stop)


def _run_in_processes(spread: _Spread[JobT], workers: int) -> None:
    """Run several jobs at the same time, in worker processes, the longest first."""
    jobs, processes = spread.jobs, min(workers, len(spread.jobs))
    device = jobs[0].setup.config.device
    of_each = workers // processes if device == "cpu" else 1
    pool = Workers(processes, _ProcessWork(jobs, of_each, spread.stop), device)
    try:
        pool.map(
            spread.longest_first(),
            spread.describe,
            lambda sent: spread.listener(jobs[sent[0]], sent[1]),
            spread.can_abandon,
        )
    finally:
        pool.close()


TIMING = "timing.jsonl"  # of all parts together
COMMITS = ("done.json", "failure.json", "rung-")  # written last, when a part or trial has ended


@dataclass(frozen=True)
class Changes:
    """Files below a directory that were written, and those that were removed."""

    written: dict[str, bytes]
    removed: list[str]

    def apply(self, root: Path) -> None:
        """Do the same below ``root``, in an order that a kill may interrupt anywhere."""
        for name in sorted(self.written, key=_order):
            path = root / name
            try:
                make_private(path.parent)
                if name == TIMING:
                    with path.open("ab") as file:
                        file.write(self.written[name])
                    continue
            except OSError as error:
                raise cannot_write(path, error) from error
            write_durably(path, self.written[name])
        for name in self.removed:
            with suppress(OSError):  # then it is removed by the resume that would not use it
                (root / name).unlink()
                (root / name).parent.rmdir()  # if it is empty


def _order(name: str) -> tuple[int, str]:
    """States and metrics, then the checkpoint that needs them, then what marks the end."""
    last = Path(name).name
    return 2 if last.startswith(COMMITS) else int(last.startswith("checkpoint-")), name


@dataclass
class Tracked:
    """Reports what changed in a directory since it was last inspected."""

    root: Path
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)

    def changes(self) -> Changes:
        now = {}
        for path in self.root.rglob("*"):
            if path.is_file() and not path.name.endswith(TEMPORARY):
                about = path.stat()
                now[str(path.relative_to(self.root))] = about.st_mtime_ns, about.st_size
        changed = [name for name, about in now.items() if self._seen.get(name) != about]
        removed = [name for name in self._seen if name not in now]
        self._seen = now
        return Changes({name: (self.root / name).read_bytes() for name in changed}, removed)

    def checkpoints(self) -> set[str]:
        """The names of all checkpoints."""
        return {str(path) for path in self.root.rglob("checkpoint-*")}


@dataclass(frozen=True)
class _NodeWork:
    """The work of an actor: run one job in a directory of its own."""

    jobs: Sequence[Job]

    def __call__(self, task: tuple[int, Changes], notify: Callable[[Any], Any]) -> Changes:
        number, files = task
        job = self.jobs[number]
        with TemporaryDirectory(prefix="nufed-") as place:
            root = Path(place) / job.directory.path.name
            files.apply(root)
            tracked, stop = Tracked(root), Stop()
            tracked.changes()
            known = tracked.checkpoints()

            def listen(event: Event) -> None:
                nonlocal known
                saved = tracked.checkpoints()
                changes = tracked.changes() if saved != known else None
                known = saved
                if notify((number, event, changes)):
                    stop.request()

            replace(job, directory=RunDirectory(root))(listen, 1, stop)
            return tracked.changes()


def _run_on_nodes(spread: _Spread[JobT], cluster: RayCluster) -> None:
    """Run jobs on a cluster, the longest first, and write here what they write there."""
    jobs = spread.jobs

    def read_files(number: int) -> tuple[int, Changes]:
        root, contents = jobs[number].directory.path, dict[str, bytes]()
        for files in jobs[number].files().values():
            for path in sorted(files.folder.rglob("*")):
                if path.is_file():
                    contents[str(path.relative_to(root))] = path.read_bytes()
        return number, Changes(contents, [])

    def follow(sent: tuple[int, Event, Changes | None]) -> None:
        number, event, changes = sent
        if changes:
            changes.apply(jobs[number].directory.path)
        spread.listener(jobs[number], event)

    pool = cluster.workers(_NodeWork(jobs), spread.stop)
    try:
        pool.map(
            spread.longest_first(),
            spread.describe,
            follow,
            spread.can_abandon,
            prepare=read_files,
            on_result=lambda number, changes: changes.apply(jobs[number].directory.path),
        )
    finally:
        pool.close()
