"""Trains the trials of a search over one pool of workers, and keeps their records on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from nufed.errors import InputError, RunError, shown
from nufed.experiment.jobs import Job, run_jobs
from nufed.experiment.observers import Event
from nufed.experiment.run_parts import RunPart
from nufed.experiment.setup import Setup
from nufed.experiment.stopping import Stop
from nufed.experiment.tuning.halving import KEEP, Predict
from nufed.experiment.tuning.trial_jobs import (
    TrialJob,
    discard_training,
    read_rung,
    setup_of,
    write_rung,
)
from nufed.files import cannot_write, make_private, write_sealed
from nufed.runs import RunDirectory
from nufed.runs.json_files import read_record
from nufed.runs.tuning_record import AskedTrial, RungScore, SearchRecord


@dataclass(frozen=True)
class TuneEvent:
    """Progress of a search, for display.

    ``share`` is the part of all work that is done, ``best`` the best fully trained score by method.
    ``left`` are the seconds that the rest takes at the pace so far; None if not known yet.
    """

    stage: Literal["search", "repeats"]
    trial: AskedTrial
    round: int
    rounds: int
    trials: int
    share: float
    best: Mapping[str, float]
    left: float | None


TuneListener: TypeAlias = Callable[[TuneEvent], None]


class Trainer:
    """Trains trials and remembers how much of the search is done.

    Args:
        setup: of the search.
        plan: what is searched.
        path: the directory of the search.
        predict: the work of a round of a method with some settings.
        stop: the stop flag.
        listener: called with the progress after every round.
    """

    def __init__(
        self,
        setup: Setup,
        plan: SearchRecord,
        path: Path,
        predict: Predict,
        stop: Stop,
        listener: TuneListener,
    ) -> None:
        self._setup, self._plan, self._path = setup, plan, path
        self._predict, self._stop, self._listener = predict, stop, listener
        self._stage: Literal["search", "repeats"] = "search"
        self._best: dict[str, float] = {}
        self._over = 0
        self._done, self._new, self._began = 0.0, 0.0, time.monotonic()
        repeated = len(plan.repeat_seeds) * setup.config.tune.finalists
        repeats = repeated * sum(own.work for own in plan.methods.values())
        searched = plan.allowed * len(plan.methods)
        if plan.per == "trial":
            pairs = zip([0, *plan.rungs], plan.rungs, strict=False)
            share = sum((b - a) / KEEP**k for k, (a, b) in enumerate(pairs)) / plan.rungs[-1]
            searched = plan.budget * share * sum(own.work for own in plan.methods.values())
        self._total = searched + repeats

    def repeat(self, asked: Sequence[AskedTrial], rounds: int) -> Sequence[RungScore]:
        """Train finalists with other seeds, all at once."""
        self._stage = "repeats"
        found = self(asked, rounds)
        for each in asked:
            self.discard(each)
        return found

    def __call__(self, asked: Sequence[AskedTrial], rounds: int) -> Sequence[RungScore]:
        """Train trials further, to so many rounds; their scores.

        Those that have a score of that rung are not trained again. Raises KeyboardInterrupt if
        stopped; checkpoints are then saved.
        """
        jobs = [job for each in asked for job in self._job(each, rounds)]
        run_jobs(jobs, self._setup.workers, lambda job, event: self._show(job, event), self._stop)
        if self._stop():
            raise KeyboardInterrupt
        found = []
        for each in asked:
            score = read_rung(self._folder(each), rounds)
            assert score is not None
            found.append(score)
            self._note(each, score)
        return found

    def discard(self, asked: AskedTrial) -> None:
        """Called for a trial that is over."""
        self._over += self._stage == "search"
        try:
            discard_training(self._folder(asked))
        except OSError as error:
            raise cannot_write(self._folder(asked), error) from error

    def _job(self, asked: AskedTrial, rounds: int) -> list[TrialJob]:
        """The job that trains a trial; none if its score is known."""
        folder = self._folder(asked)
        self._record(asked, folder)
        if read_rung(folder, rounds) is not None:
            self._done += self._work(asked, rounds)
            return []
        try:
            setup = setup_of(self._setup, asked.method, asked.settings)
        except InputError as error:
            write_rung(folder, RungScore(rounds=rounds, failure=str(error)))
            return []
        part = RunPart(asked.seed, asked.method, self._work(asked, rounds))
        directory = RunDirectory(self._path)
        plan = self._plan
        chosen = plan.format == 1 or rounds == plan.rungs[-1]
        return [TrialJob(setup, directory, part, asked, rounds, folder, plan.agents, chosen)]

    def _folder(self, asked: AskedTrial) -> Path:
        name = f"{asked.method}-{asked.number:04d}"
        if self._stage == "repeats":
            name += f"-seed-{asked.seed}"
        return self._path / ("repeats" if self._stage == "repeats" else "trials") / name

    def _record(self, asked: AskedTrial, folder: Path) -> None:
        """Write a trial's settings; in a resumed search they must be those of before."""
        path = folder / "trial.json"
        if not path.exists():
            try:
                make_private(folder)
            except OSError as error:
                raise cannot_write(folder, error) from error
            write_sealed(path, asked.model_dump())
            return
        before = read_record(path, AskedTrial)
        if before != asked:
            raise RunError(
                f"{path} has the settings {shown(before.settings)}, and this search asks for "
                f"{shown(asked.settings)}: it was started with other software; start a new one"
            )

    def _work(self, asked: AskedTrial, rounds: int) -> float:
        """The predicted work from the rung before to ``rounds``."""
        before = [rung for rung in self._plan.rungs if rung < rounds]
        start = before[-1] if before and self._stage == "search" else 0
        return (rounds - start) * self._predict(asked.method, asked.settings)

    def _note(self, asked: AskedTrial, score: RungScore) -> None:
        last = score.rounds == self._plan.rungs[-1]
        if self._stage == "search" and last and score.failure is None:
            best, new = self._best.get(asked.method), float(score.score or 0.0)
            if best is None or (new > best) == self._plan.higher_is_better:
                self._best[asked.method] = new

    def _show(self, job: Job, event: Event) -> None:
        assert isinstance(job, TrialJob)
        if event.round:
            work = self._predict(job.trial.method, job.trial.settings)
            self._done, self._new = self._done + work, self._new + work
        spent = time.monotonic() - self._began
        left = (self._total - self._done) * spent / self._new if self._new else None
        self._listener(
            TuneEvent(
                self._stage,
                job.trial,
                event.round,
                job.rounds,
                self._over,
                min(1.0, self._done / self._total) if self._total else 1.0,
                dict(self._best),
                None if left is None else max(0.0, left),
            )
        )
