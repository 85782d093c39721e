"""Runs the parts of one or several runs, spread over worker processes together.

Runs jobs on the nodes of a cluster, which need not share a file system with this machine.

A job starts on a node from the files that this machine has of it. Whenever it has saved a
checkpoint, and at its end, the files that it changed are sent and written here. So a job whose node
is lost resumes elsewhere from that checkpoint, and so does a run whose driver was killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from nufed.files import TEMPORARY, cannot_write, make_private, write_durably
from nufed.lab.experiment.observers import Event, Listener
from nufed.lab.experiment.run_parts import (
    BASELINE_PART,
    RunPart,
    part_files,
    run_baselines,
    run_method,
)
from nufed.lab.experiment.setup import Setup
from nufed.lab.experiment.stopping import Stop
from nufed.lab.runs import RunDirectory
from nufed.simulation import RayCluster, Workers


@dataclass(frozen=True)
class Job:
    """A part of a run, the run's setup and its directory."""

    setup: Setup
    directory: RunDirectory
    part: RunPart

    def __str__(self) -> str:
        return str(self.part)

    @property
    def root(self) -> Path:
        """The directory below which the part writes."""
        return self.directory.path

    @property
    def folders(self) -> list[Path]:
        """The directories in ``root`` that the part reads and writes."""
        files = part_files(self.setup, self.part, self.directory).values()
        return [own.folder.relative_to(self.root) for own in files]

    def moved(self, root: Path) -> Job:
        """The same part below another directory."""
        return replace(self, directory=RunDirectory(root))

    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        files = part_files(self.setup, self.part, self.directory).values()
        return all(own.is_done(self.setup.config.rounds) for own in files)

    @property
    def run(self) -> Callable[[Listener, int, Stop], None]:
        """Runs the part, given a listener, a number of processes and a stop flag."""
        run_part = run_baselines if self.part.method == BASELINE_PART else run_method
        return partial(run_part, self.setup, self.part, self.directory)


JobListener: TypeAlias = Callable[[Job, Event], None]


def run_jobs(jobs: Sequence[Job], workers: int, listener: JobListener, stop: Stop) -> None:
    """Run all jobs: several at the same time if there are several workers, else one by one.

    The number of workers changes no bit. After a signal that ``stop`` handles, running jobs save a
    checkpoint and the others are not started. On a cluster, jobs go to its nodes; one alone,
    or fewer than half of its slots, run one by one, and the agents of each are spread.
    """
    cluster = jobs[0].setup.cluster if jobs else None
    if cluster is not None:
        left = [job for job in jobs if not job.is_done()]
        if len(left) > 1 and 2 * len(left) >= cluster.slots:
            run_on_nodes(left, cluster, listener, stop)
            jobs = [job for job in jobs if not any(job is other for other in left)]
    elif workers > 1 and len(jobs) > 1:
        _run_in_parallel(jobs, workers, listener, stop)
        return
    for job in jobs:
        if not stop():
            job.run(partial(listener, job), workers, stop)


@dataclass(frozen=True)
class _Work:
    """What a worker process does: the job of a number."""

    jobs: Sequence[Job]
    workers: int  # of each process
    stop: Stop

    def __call__(self, number: int, notify: Callable[[tuple[int, Event]], None]) -> None:
        if not self.stop():
            self.jobs[number].run(lambda event: notify((number, event)), self.workers, self.stop)


def _run_in_parallel(jobs: Sequence[Job], workers: int, listener: JobListener, stop: Stop) -> None:
    """Run several jobs at the same time, in worker processes, the longest first."""
    processes = min(workers, len(jobs))

    def describe(number: int, last: tuple[int, Event] | None) -> str:
        job = jobs[number]
        return f"{job}, after round {last[1].round}" if last else str(job)

    def can_abandon(busy: list[int]) -> bool:
        return stop() and all(jobs[number].part.method == BASELINE_PART for number in busy)

    pool = Workers(processes, _Work(jobs, workers // processes, stop))
    try:
        longest_first = sorted(range(len(jobs)), key=lambda number: -jobs[number].part.work)
        pool.map(
            longest_first, describe, lambda sent: listener(jobs[sent[0]], sent[1]), can_abandon
        )
    finally:
        pool.close()


TIMING = "timing.jsonl"  # of all parts together
COMMITS = ("done.json", "failure.json", "rung-")  # written last: a part, or trial, is over


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
    """A directory whose changes since the last look are wanted."""

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
    """What an actor does: one job, in a directory of its own."""

    jobs: Sequence[Job]

    def __call__(self, task: tuple[int, Changes], notify: Callable[[Any], Any]) -> Changes:
        number, files = task
        with TemporaryDirectory(prefix="nufed-") as place:
            root = Path(place) / self.jobs[number].root.name
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

            self.jobs[number].moved(root).run(listen, 1, stop)
            return tracked.changes()


def run_on_nodes(
    jobs: Sequence[Job], cluster: RayCluster, listener: JobListener, stop: Stop
) -> None:
    """Run jobs on a cluster, the longest first, and write here what they write there."""

    def files(number: int) -> tuple[int, Changes]:
        root, found = jobs[number].root, dict[str, bytes]()
        for folder in jobs[number].folders:
            for path in sorted((root / folder).rglob("*")):
                if path.is_file():
                    found[str(path.relative_to(root))] = path.read_bytes()
        return number, Changes(found, [])

    def describe(number: int, last: Any) -> str:
        return f"{jobs[number]}, after round {last[1].round}" if last else str(jobs[number])

    def follow(sent: tuple[int, Event, Changes | None]) -> None:
        number, event, changes = sent
        if changes:
            changes.apply(jobs[number].root)
        listener(jobs[number], event)

    def can_abandon(busy: list[int]) -> bool:
        return stop() and all(jobs[number].part.method == BASELINE_PART for number in busy)

    longest_first = sorted(range(len(jobs)), key=lambda number: -jobs[number].part.work)
    pool = cluster.workers(_NodeWork(jobs), stop)
    try:
        pool.map(
            longest_first,
            describe,
            follow,
            can_abandon,
            prepare=files,
            on_result=lambda number, changes: changes.apply(jobs[number].root),
        )
    finally:
        pool.close()
