"""Runs the parts of one or several runs, spread over worker processes together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from nufed.experiment.node_jobs import run_on_nodes
from nufed.experiment.observers import Event, Listener
from nufed.experiment.run_parts import (
    BASELINE_PART,
    RunPart,
    part_files,
    run_baselines,
    run_method,
)
from nufed.experiment.setup import Setup
from nufed.experiment.stopping import Stop
from nufed.runs import RunDirectory
from nufed.simulation import Workers


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
