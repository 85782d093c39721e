"""Runs the parts of one or several runs, spread over worker processes together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from nufed.experiment.observers import Event, Listener
from nufed.experiment.run_parts import BASELINE_PART, RunPart, run_baselines, run_method
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
    def run(self) -> Callable[[Listener, int, Stop], None]:
        """Runs the part, given a listener, a number of processes and a stop flag."""
        run_part = run_baselines if self.part.method == BASELINE_PART else run_method
        return partial(run_part, self.setup, self.part, self.directory)


JobListener: TypeAlias = Callable[[Job, Event], None]


def run_jobs(jobs: Sequence[Job], workers: int, listener: JobListener, stop: Stop) -> None:
    """Run all jobs: several at the same time if there are several workers, else one by one.

    The number of workers changes no bit. After a signal that ``stop`` handles, running jobs save a
    checkpoint and the others are not started.
    """
    if workers > 1 and len(jobs) > 1:
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
