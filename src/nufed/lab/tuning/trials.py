"""Trains the trials of a search, spread over workers together, and keeps their records on disk."""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from nufed.algorithms.protocol import Algorithm
from nufed.errors import InputError, RunError, TrainingError, UpdateError, shown
from nufed.evaluate import ByScale, choose_step_sizes, preferred, summarise
from nufed.lab.config import Config
from nufed.lab.config.methods import MethodConfig
from nufed.lab.config.schema import ScoredAgents
from nufed.lab.experiment.evaluation import Evaluator
from nufed.lab.experiment.jobs import RunPart, run_jobs
from nufed.lab.experiment.observers import Event
from nufed.lab.experiment.session import Stop
from nufed.lab.experiment.setup import Setup
from nufed.lab.experiment.training import Finish, MethodJob
from nufed.lab.files import cannot_write, make_private, write_sealed
from nufed.lab.runs import RunDirectory
from nufed.lab.runs.json_files import finite, read_lines, read_record
from nufed.lab.runs.part_files import PartFiles, Recorder
from nufed.lab.runs.records import MetricsLine
from nufed.lab.runs.tuning_record import AskedTrial, RungScore, SearchRecord
from nufed.lab.tuning.search import KEEP, Predict
from nufed.server import Progress
from nufed.simulation import Engine

METRICS = "metrics.jsonl"
KEPT = ("trial.json", "rung-*.json")  # of a trial that has ended


@dataclass(frozen=True)
class TrialJob(MethodJob):
    """Trains a trial to its next rung and scores it on validation samples, never on test samples.

    A training that fails gets no score; the reason is recorded instead.

    Args:
        setup: the trial's own, with its settings, and with the rounds of the rung.
        trial: as it was asked.
        folder: its directory, below that of the search.
        agents: those whose validation samples score it.
        chosen: whether the step size of fine-tuning is chosen for its score, as for results.
    """

    trial: AskedTrial
    folder: Path
    agents: ScoredAgents
    chosen: bool = True

    checks_curvature = False

    def files(self) -> dict[str, PartFiles]:
        setup, folder = self.setup, self.directory.path / self.folder
        belongs_to = setup.problem.belongs_to(self.trial.seed)
        files = PartFiles(folder, belongs_to, device=setup.config.device)
        return {self.trial.method: files}

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        config, name, seed = self.setup.config, self.trial.method, self.trial.seed
        files, algorithm = self.files()[name], self.setup.algorithms[name]
        try:
            with (
                errors_only(),
                Recorder(self.directory, files, config, name, algorithm, seed) as recorder,
            ):
                yield recorder
        except (TrainingError, UpdateError, InputError) as error:
            self._write(files.folder, RungScore(rounds=config.rounds, failure=str(error)))

    def evaluate(
        self, engine: Engine, progress: Progress, recorder: Recorder
    ) -> tuple[dict[str, Any], Finish | None]:
        if not recorder.is_last(progress):
            return {}, None

        def finish() -> None:
            self._write(recorder.files.folder, validation_score(self, engine, progress))

        return {}, finish

    def _write(self, folder: Path, score: RungScore) -> None:
        """Write the score with the work of all rounds so far."""
        path = folder / METRICS
        spent = read_lines(path, MetricsLine) if path.exists() else []
        work = {key: sum(getattr(line, key) for line in spent) for key in ("gradients", "hvps")}
        write_rung(folder, score.model_copy(update=work))


def with_settings(config: Config, method: str, settings: Mapping[str, Any]) -> Config:
    """The configuration with other settings of one method."""
    shared = MethodConfig(algorithm=config.method.algorithm)
    table = config.methods.get(method, shared).model_dump()
    methods = {**config.methods, method: MethodConfig(**{**table, **settings})}
    return config.model_copy(update={"methods": methods})


def setup_of(base: Setup, method: str, settings: Mapping[str, Any]) -> Setup:
    """The setup of a trial: that of the search, with other settings of one method.

    Raises an :class:`~nufed.errors.InputError` if the algorithm can't have these settings.
    """
    config, problem = base.config, base.problem
    given = dict(problem.given.methods or {})
    if method in given:
        given[method] = dataclasses.replace(given[method], **settings)
    changed = with_settings(config, method, settings)
    algorithm = changed.algorithms(given)[method].checks.without_warnings()
    engine = base.engine_names[method]
    if _engine_key(algorithm) != _engine_key(base.algorithms[method]):
        engine = base.engines[config.seeds[0]].choose(algorithm, config.engine)
    return dataclasses.replace(
        base,
        config=changed,
        problem=dataclasses.replace(problem, config=changed),
        algorithms={method: algorithm},
        engine_names={method: engine},
    )


def _engine_key(algorithm: Algorithm) -> Any:
    """What the choice of an engine depends on, beside the problem."""
    draws = [(draw.size, draw.number) for draw in algorithm.update_draws()]
    return algorithm.combines, algorithm.batch_size, algorithm.receives, algorithm.sends, draws


def rung_path(folder: Path, rounds: int) -> Path:
    return folder / f"rung-{rounds:06d}.json"


def read_rung(folder: Path, rounds: int) -> RungScore | None:
    """The score of a trial after ``rounds`` rounds; None if it is not trained that long."""
    path = rung_path(folder, rounds)
    return read_record(path, RungScore) if path.exists() else None


def write_rung(folder: Path, score: RungScore) -> None:
    write_sealed(rung_path(folder, score.rounds), finite(score.model_dump()))


def discard_training(folder: Path) -> None:
    """Remove the checkpoints and states of a trial that is not trained further."""
    kept = {path for pattern in KEPT for path in folder.glob(pattern)}
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path not in kept:
            path.unlink()


def validation_score(job: TrialJob, engine: Engine, progress: Progress) -> RungScore:
    """The mean score of agents on their validation samples, after the steps that results show.

    After the last rung, the step size of fine-tuning is chosen on the validation samples of seen
    agents, as for final results, unless ``eval_lr = "as_trained"``. It costs evaluation, but no
    training. After the others it is that of training, unless this diverges: a larger one fine-tunes
    away what training has learned so far.
    """
    setup, seed, measure = job.setup, job.trial.seed, job.setup.measure
    evaluator = Evaluator.of(setup, engine, job.trial.method)
    config, steps = setup.config, evaluator.steps

    def on(agents: Sequence[int]) -> ByScale:
        return evaluator.scorer(progress, "validation", agents, steps)

    def with_scale(scale: float, gradients: int = 0, hvps: int = 0) -> RungScore:
        (scores,) = on(scored_agents(setup, seed, job.agents))([scale])
        gradients += len(scores) * steps + sum(each.personal_gradients for each in scores)
        hvps += sum(each.personal_hvps for each in scores)
        summary = summarise(scores, steps, measure)
        return _rung(job, summary.mean, summary.loss, scale, gradients, hvps)

    may_choose = steps and config.eval_lr != "as_trained"
    if may_choose and not job.chosen:
        as_trained = with_scale(1.0)
        if as_trained.failure is None:
            return as_trained
    scale, gradients, hvps = 1.0, 0, 0
    if may_choose:
        seen = on(sorted(setup.validated(seed)))
        sizes = choose_step_sizes(seen, [steps], measure, preferred(evaluator.algorithm))
        if sizes is not None:
            scale, gradients, hvps = sizes.scale(steps), sizes.gradients, sizes.hvps
            if job.agents == "seen":
                chosen = sizes.chosen[0]
                return _rung(job, chosen.score, chosen.loss, scale, gradients, hvps)
    return with_scale(scale, gradients, hvps)


def _rung(
    job: TrialJob, score: float, loss: float, scale: float, gradients: int, hvps: int
) -> RungScore:
    rounds, failure = job.setup.config.rounds, None
    trained = job.setup.config.rounds_of(job.trial.method)
    if not math.isfinite(score):
        name = job.setup.measure.name
        cause = f"{name} is NaN for some agent although the loss is finite"
        failure = f"the validation score after {trained} rounds is not finite: " + (
            cause if math.isfinite(loss) else "it diverged"
        )
    return RungScore(
        rounds=rounds,
        score=finite(score),
        loss=finite(loss),
        scale=scale,
        evaluation_gradients=gradients,
        evaluation_hvps=hvps,
        failure=failure,
    )


def scored_agents(setup: Setup, seed: int, agents: ScoredAgents) -> list[int]:
    """The evaluated agents, seen or unseen, that have validation samples."""
    if agents == "seen":
        return sorted(setup.validated(seed))
    federation = setup.federations[seed].scoring("validation")
    unseen = set(federation.split.unseen)
    return federation.scorable(agent for agent in setup.evaluated[seed] if agent in unseen)


@contextmanager
def errors_only() -> Iterator[None]:
    """Without log messages about updates that are left out: a bad trial has many."""
    log = logging.getLogger("nufed")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


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
        repeats = repeated * sum(method.work for method in plan.methods.values())
        searched = plan.allowed * len(plan.methods)
        if plan.per == "trial":
            pairs = zip([0, *plan.rungs], plan.rungs, strict=False)
            share = sum((b - a) / KEEP**k for k, (a, b) in enumerate(pairs)) / plan.rungs[-1]
            searched = plan.budget * share * sum(method.work for method in plan.methods.values())
        self._total = searched + repeats

    def repeat(self, asked: Sequence[AskedTrial], rounds: int) -> Sequence[RungScore]:
        """Train finalists with other seeds, all at once."""
        self._stage = "repeats"
        scores = self(asked, rounds)
        for each in asked:
            self.discard(each)
        return scores

    def __call__(self, asked: Sequence[AskedTrial], rounds: int) -> Sequence[RungScore]:
        """Train trials until they have ``rounds`` rounds, and return their scores.

        Those that have a score of that rung are not trained again. Raises KeyboardInterrupt if
        stopped; checkpoints are then saved.
        """
        jobs = [job for each in asked if (job := self._job(each, rounds)) is not None]
        run_jobs(jobs, self._setup.workers, self._show, self._stop)
        if self._stop():
            raise KeyboardInterrupt
        scores = []
        for each in asked:
            score = read_rung(self._folder(each), rounds)
            assert score is not None
            scores.append(score)
            self._note(each, score)
        return scores

    def discard(self, asked: AskedTrial) -> None:
        """Called with a trial that is not trained further."""
        self._over += self._stage == "search"
        try:
            discard_training(self._folder(asked))
        except OSError as error:
            raise cannot_write(self._folder(asked), error) from error

    def _job(self, asked: AskedTrial, rounds: int) -> TrialJob | None:
        """The job that trains a trial; None if its score is known."""
        folder, plan = self._folder(asked), self._plan
        self._record(asked, folder)
        if read_rung(folder, rounds) is not None:
            self._done += self._work(asked, rounds)
            return None
        try:
            setup = setup_of(self._setup, asked.method, asked.settings)
        except InputError as error:
            write_rung(folder, RungScore(rounds=rounds, failure=str(error)))
            return None
        update = {"eval_every": 1, "save_every": 0}
        config = setup.config.shortened(rounds).model_copy(update=update)
        return TrialJob(
            dataclasses.replace(setup, config=config),
            RunDirectory(self._path),
            RunPart(asked.seed, asked.method, self._work(asked, rounds)),
            asked,
            folder.relative_to(self._path),
            plan.agents,
            chosen=plan.format == 1 or rounds == plan.rungs[-1],
        )

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

    def _show(self, job: TrialJob, event: Event) -> None:
        config, rounds = job.setup.config, job.setup.config.rounds_of(job.trial.method)
        if event.round and not event.starts:
            work = self._predict(job.trial.method, job.trial.settings) * config.rounds / rounds
            self._done, self._new = self._done + work, self._new + work
        spent = time.monotonic() - self._began
        left = (self._total - self._done) * spent / self._new if self._new else None
        self._listener(
            TuneEvent(
                self._stage,
                job.trial,
                event.round,
                rounds,
                self._over,
                min(1.0, self._done / self._total) if self._total else 1.0,
                dict(self._best),
                None if left is None else max(0.0, left),
            )
        )
