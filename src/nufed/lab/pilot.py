"""The pilot of ``nufed advise CONFIG``: a short comparison before any real training.

On a sample of agents it measures how they differ (γ_G, γ_H, curvatures), what training alone
reaches, and trains one method of each kind (:data:`nufed.lab.analysis.recommend.KINDS`) with three
step sizes. Where the configuration holds out newcomers, a third of the sample stands for them:
they take no part in training and are scored. Only training and validation parts are read; test
parts are removed before anything is built, and the configuration's own newcomers are not touched.

Trainings go in stages: a sixteenth of the rounds with all step sizes, a quarter with the best two
of each method, then all rounds with the best one. All methods are compared after the last stage
that every one of them completed within the time. So the time decides how far the pilot gets; its
numbers follow from the seed and the stage alone.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from nufed.data import Samples, Split
from nufed.data.partition import Rows
from nufed.errors import InputError, NufedError, NumericalWarning, in_short
from nufed.evaluate import choose_step_sizes, preferred
from nufed.evaluate.scores import ENOUGH_AGENTS
from nufed.lab.analysis.estimate import Estimator
from nufed.lab.analysis.recommend import (
    KINDS,
    LOCAL,
    Halved,
    Heterogeneity,
    PilotRecord,
    Standing,
    Tried,
    gap,
    recommend,
)
from nufed.lab.board import Protocol, method_config
from nufed.lab.config.devices import torch_threads
from nufed.lab.config.load import load_config, read_config, with_overrides
from nufed.lab.config.problem import Problem, algorithms_of, build_samples
from nufed.lab.experiment.evaluation import Evaluator
from nufed.lab.experiment.setup import Setup, check_simulated
from nufed.lab.tuning.ranges import active_settings
from nufed.lab.tuning.trials import errors_only, setup_of
from nufed.seeding import stream
from nufed.server import Progress, cohort_size
from nufed.simulation import Training

MINUTES = 2.0
TRAINED, SCORED = 60, 20  # agents at most
EARLY = 8  # agents that α is chosen on before the last stage
FEWEST = 12  # agents from which some stand for newcomers
COHORT, ROUNDS = 10, 100  # at most
SHARES = (16, 4, 1)  # of all rounds that a stage ends at: a sixteenth, …
KEPT = (len(KINDS), 2, 1)  # step sizes of each method that are trained in a stage
FACTORS = (1.0, 3.0, 1 / 3, 9.0)  # of the step size
LOCAL_STEPS, LOCAL_FACTORS = 50, tuple(3.0**k for k in range(-3, 4))
MEASURED = 8  # agents whose curvature is measured
HVPS = 40  # Hessian-vector products of an agent and a model, about
SHARE_OF_TIME = 0.2  # that measuring curvature may take
NONE: Rows = np.empty(0, np.int64)
IGNORED = (  # keys of a configuration that a pilot decides
    "method", "methods", "tune", "tuned", "sweep", "seeds", "rounds", "participation", "eval_on",
    "eval_agents", "eval_every", "eval_steps", "baselines", "keep", "stop_when", "tune_local",
    "local_lr", "workers", "faults", "note", "name",
)  # fmt: skip

OnProgress: TypeAlias = Callable[[str, float], None]


class _OutOfTimeError(Exception):
    """The time is over, or the user pressed Ctrl-C."""


@dataclass
class _Clock:
    """How much of the time is left, and what is shown of it."""

    minutes: float
    on_progress: OnProgress
    now: Callable[[], float] = time.monotonic
    stopped: bool = False

    def __post_init__(self) -> None:
        self.began = self.now()

    @property
    def seconds(self) -> float:
        return self.now() - self.began

    @property
    def left(self) -> float:
        return 0.0 if self.stopped else 60 * self.minutes - self.seconds

    def show(self, what: str) -> None:
        """Say what is done; ends the pilot when the time is over."""
        if self.left <= 0:
            raise _OutOfTimeError
        self.on_progress(what, min(1.0, self.seconds / (60 * self.minutes)))

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Leaves the block when the time is over or on Ctrl-C."""
        try:
            yield
        except _OutOfTimeError:
            pass
        except KeyboardInterrupt:
            self.stopped = True


@dataclass
class _Entry:
    """A method with a step size: its training so far, and its scores by stage."""

    setup: Setup
    method: str
    factor: float
    progress: Progress
    by_stage: dict[int, Tried] = field(default_factory=dict)


def pilot(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    minutes: float = MINUTES,
    on_progress: OnProgress = lambda what, share: None,
    now: Callable[[], float] = time.monotonic,
    standing: Standing | None = None,
) -> PilotRecord:
    """Measure what :func:`nufed.lab.analysis.recommend.recommend` needs.

    Args:
        source: a preset, a TOML file or a mapping; its ``[method]`` is shared by all methods tried.
        overrides: ``key=value``, as for :func:`nufed.run`.
        minutes: at most, but for what cannot be interrupted.
        on_progress: called with what is done, and the share of the time that is over.
        now: the clock, in seconds.
        standing: ranks on the board. With them the recommended method is trained again with half of
            the agents, and of the samples.
    """
    clock = _Clock(minutes, on_progress, now)
    tables = with_overrides(source, overrides)
    name = tables.get("name") or ("mine" if isinstance(source, Mapping) else Path(source).stem)
    check_simulated(read_config(tables))
    with warnings.catch_warnings(), torch_threads(int(tables.get("threads", 1))):
        warnings.simplefilter("ignore", NumericalWarning)  # large steps are tried on purpose
        made = _Pilot.make(tables, str(name), clock)
        return made.measure(standing)


class _Pilot:
    """A problem with a sample of its agents, and what was measured so far."""

    def __init__(self, base: Problem, tables: dict[str, Any], name: str, clock: _Clock) -> None:
        self.base, self.tables, self.name, self.clock = base, tables, name, clock
        config = base.config
        self.seed, self.steps = config.seeds[0], config.steps_shown
        whole = base.federations[self.seed].split
        self.whole = whole
        newcomers = bool(whole.unseen) and len(whole.seen) >= FEWEST
        rng = stream(self.seed, "pilot agents")
        able = [agent for agent in whole.seen if len(whole.validation[agent])]
        few = min(len(able), TRAINED + (SCORED if newcomers else 0))
        sample = rng.permutation(able)[:few].tolist()
        aside = min(SCORED, few // 3) if newcomers else 0
        self.newcomers, self.trained = sorted(sample[:aside]), sorted(sample[aside:])
        self.validated = self.trained[:SCORED]
        self.scored = self.newcomers or self.validated
        self.cohort = min(COHORT, len(self.trained), cohort_size(len(whole.seen), self._rate))
        self.rounds = min(ROUNDS, int(tables.get("rounds", config.rounds)))
        self.problem = self._with_split(_only(whole, self.trained))
        self.tried: dict[str, Tried] = {}
        self.halved: list[Halved] = []
        self.left_out: list[str] = []
        self.stage = 0  # rounds of the last stage that all methods completed
        self.done = 0  # rounds of all trainings
        self.first = max(1, self.rounds // SHARES[0])
        self.fedavg: Progress | None = None

    @classmethod
    def make(cls, tables: Mapping[str, Any], name: str, clock: _Clock) -> _Pilot:
        """From the tables of a configuration; refuses one without validation samples."""
        clock.on_progress("reading data", 0.0)
        config = load_config(tables)
        kept = {k: v for k, v in tables.items() if k not in IGNORED}
        kept["method"] = {
            k: v
            for k, v in config.method.model_dump(exclude_none=True).items()
            if k not in ("algorithm", "local_epochs", "eval_steps")
        }
        data = {**kept.get("data", {}), "small_agents": "use_all"}
        kept = {**kept, "data": data, "eval_on": "validation"}
        if not config.data.validation and config.data.split_file is None:
            raise InputError(
                "= 0: a pilot scores methods on validation samples; set it, for example to 0.2",
                "data.validation",
            )
        about = {"rounds": config.rounds, "participation": config.participation}
        samples: Samples = build_samples(config.data)
        first = next(n for n in KINDS if n != LOCAL)
        first_config = _config({**kept, **about}, first, config.seeds[0], config.steps_shown)
        base = Problem.make(first_config, samples=samples)
        return cls(base, {**kept, **about}, name, clock)

    @property
    def sign(self) -> int:
        return 1 if self.problem.measure.higher_is_better else -1

    @property
    def _rate(self) -> float:
        return float(self.tables["participation"])

    def measure(self, standing: Standing | None) -> PilotRecord:
        """Everything, in order of importance, until the time is over."""
        clock = self.clock
        with errors_only():
            with clock.limited():
                self._alone()
                self._methods()
            measured: list[Heterogeneity] = []
            smooth = False
            if self.fedavg is not None:
                with clock.limited():
                    smooth, measured = self._heterogeneity()
            record = self._record(measured, smooth)
            if not self.stage:
                self.left_out.append(
                    "some step sizes: the time ended before every method had trained "
                    f"{self.first} rounds with each"
                )
            if not [name for name in record.ran if name != LOCAL]:
                raise InputError(
                    f"--minutes {clock.minutes:g}: not one method was trained in this time; give "
                    "more minutes, or a smaller model"
                )
            with clock.limited():
                self._halve(record, standing)
        if clock.left <= 0:
            why = "it was interrupted" if clock.stopped else "the time was over"
            self.left_out.append(f"the rest: {why}")
        update = {"halved": self.halved, "left_out": self.left_out}
        return record.model_copy(update={**update, "seconds": round(clock.seconds, 1)})

    def _with_split(self, split: Split) -> Problem:
        federation = self.base.federations[self.seed]
        changed = dataclasses.replace(federation, split=split)
        return dataclasses.replace(self.base, federations={self.seed: changed})

    def _setup(self, method: str, problem: Problem | None = None) -> Setup:
        """A method on the sample of agents."""
        problem = problem or self.problem
        rate = self.cohort / len(problem.federations[self.seed].split.seen)
        tables = {**self.tables, "rounds": self.rounds, "participation": min(1.0, rate)}
        config = _config(tables, method, self.seed, self.steps)
        of_method = dataclasses.replace(
            problem, config=config, algorithms=algorithms_of(config, {})
        )
        return Setup.make(of_method.with_step_sizes())

    def _alone(self) -> None:
        """Training alone, from the initial model: step size and steps chosen on validation loss."""
        self.clock.show("training alone")
        first = next(name for name in KINDS if name != LOCAL)
        setup = self._setup(first)
        evaluator, progress = self._evaluator(setup, first), _start(setup, first, self.seed)
        rate = float(setup.algorithms[first].adaptation.lr or 1.0)
        try:
            tried = evaluator.scorer(progress, "validation", self.validated, LOCAL_STEPS)(
                LOCAL_FACTORS
            )
            losses = np.array([[s.loss for s in scores] for scores in tried]).mean(axis=1)
            losses[~np.isfinite(losses)] = np.inf
            place, stop = np.unravel_index(int(losses.argmin()), losses.shape)
            best = LOCAL_FACTORS[place]
            self.tried[LOCAL] = self._scores(
                evaluator, progress, LOCAL, best, int(stop)
            ).model_copy(update={"shared": None, "adapt_lr": best * rate})
        except NufedError as error:
            self.tried[LOCAL] = Tried(method=LOCAL, score=None, failure=in_short(error))

    def _methods(self) -> None:
        """Stage by stage, all methods with all step sizes, then the best of these."""
        entries, began = self._entries(), self.clock.seconds
        for stage, most in self._stages().items():
            kept = self._best(entries, most) if self.stage else entries
            more = sum(stage - entry.progress.round for entry in kept)
            pace = (self.clock.seconds - began) / max(1, self.done)
            if self.stage and pace * more > self.clock.left:
                self.left_out.append(f"trainings of {stage} rounds: they would take too long")
                break
            for entry in kept:
                self.clock.show(f"{entry.method}, {stage} rounds")
                self._advance(entry, stage)
                if not self.stage:  # of the first stage whatever is done counts
                    self._note(entries, stage)
            self.stage, entries = stage, kept
            self._note(entries, stage)

    def _entries(self) -> list[_Entry]:
        """All methods that the problem can have, with all step sizes; the given sizes first."""
        made: list[_Entry] = []
        for method in KINDS:
            if method == LOCAL:
                continue
            try:
                setup = self._setup(method)
            except InputError as error:
                self.tried[method] = Tried(method=method, score=None, failure=in_short(error))
                continue
            for factor in FACTORS:
                sized = _scaled(setup, method, factor)
                made.append(_Entry(sized, method, factor, _start(sized, method, self.seed)))
        return sorted(made, key=lambda entry: FACTORS.index(entry.factor))

    def _stages(self) -> dict[int, int]:
        """The rounds of each stage, and how many step sizes of a method are trained in it."""
        return {
            max(1, self.rounds // share): most for share, most in zip(SHARES, KEPT, strict=True)
        }

    def _best(self, entries: Sequence[_Entry], most: int) -> list[_Entry]:
        """Each method with its best step sizes so far."""
        kept: list[_Entry] = []
        for method in dict.fromkeys(entry.method for entry in entries):
            able = [
                entry
                for entry in entries
                if entry.method == method and entry.by_stage[self.stage].failure is None
            ]
            able.sort(key=lambda e: _rank(e.by_stage[self.stage], self.sign), reverse=True)
            kept += able[:most]
        return kept

    def _advance(self, entry: _Entry, stage: int) -> None:
        """Train a method to a stage, and score it."""
        engine = entry.setup.engines[self.seed].get(entry.setup.engine_names[entry.method])
        training = Training(
            entry.setup.algorithms[entry.method],
            engine,
            entry.setup.config.participation,
            entry.setup.rules,
        )
        try:
            for progress in training.rounds(entry.progress, stage):
                self.done += progress.round - entry.progress.round
                entry.progress = progress
                if self.clock.left <= 0:
                    raise _OutOfTimeError
            entry.by_stage[stage] = self._score(entry, stage == self.rounds)
        except NufedError as error:
            entry.by_stage[stage] = Tried(method=entry.method, score=None, failure=in_short(error))

    def _score(self, entry: _Entry, last: bool) -> Tried:
        """Scores with the step size of fine-tuning chosen on agents in training: before the last
        stage on few of them, in factors of 3."""
        evaluator = self._evaluator(entry.setup, entry.method)
        algorithm, steps = evaluator.algorithm, self.steps
        agents = self.validated if last else self.validated[:EARLY]
        validate = evaluator.scorer(entry.progress, "validation", agents, steps)
        prefer = preferred(algorithm) if last else "best"
        sizes = choose_step_sizes(validate, [steps], entry.setup.measure, prefer)
        scale = 1.0 if sizes is None else sizes.scale(steps)
        tried = self._scores(
            evaluator, entry.progress, entry.method, scale or 1.0, steps if scale else 0
        )
        rate = float(algorithm.adaptation.lr or 0.0)
        update = {"settings": _to_start_with(entry, scale), "factor": entry.factor}
        return tried.model_copy(update={**update, "adapt_lr": scale * rate})

    def _scores(
        self, evaluator: Evaluator, progress: Progress, method: str, scale: float, steps: int
    ) -> Tried:
        """Scores of the agents that count, after some steps of a known size."""
        measure = evaluator.setup.measure.resampled(len(self.scored))
        if len(self.scored) >= ENOUGH_AGENTS:
            measure = dataclasses.replace(measure, resamples=0)
        most = max(steps, 1)
        (scores,) = evaluator.scorer(progress, "validation", self.scored, most, measure)([scale])
        values = [each.score[steps] for each in scores]
        shared = [each.global_score for each in scores]
        known = [each for each in shared if each is not None]
        if not np.isfinite(values).all():
            return Tried(method=method, score=None, failure="the validation score is not finite")
        return Tried(
            method=method,
            steps=steps,
            score=float(np.mean(values)),
            shared=float(np.mean(known)) if len(known) == len(shared) else None,
            scores=values,
            resampled=[list(each.resampled[steps]) for each in scores if each.resampled],
        )

    def _evaluator(self, setup: Setup, method: str) -> Evaluator:
        engine = setup.engines[self.seed].get(setup.engine_names[method])
        return Evaluator(setup, engine, setup.algorithms[method], self.steps)

    def _note(self, entries: Sequence[_Entry], stage: int) -> None:
        """Record the best step size of every method that has completed a stage."""
        for method in dict.fromkeys(entry.method for entry in entries):
            done = [
                (e, e.by_stage[stage])
                for e in entries
                if e.method == method and stage in e.by_stage
            ]
            if not done:
                continue
            entry, best = max(done, key=lambda pair: _rank(pair[1], self.sign))
            self.tried[method] = best
            if method == "fedavg-5":
                self.fedavg = entry.progress

    def _heterogeneity(self) -> tuple[bool, list[Heterogeneity]]:
        """γ_G, γ_H and curvatures at the initial model and at FedAvg's, on as many agents as the
        time allows."""
        problem, measured = self.problem, list[Heterogeneity]()
        objective, federation = problem.objectives[self.seed], problem.federations[self.seed]
        for agents in (MEASURED, MEASURED // 2, 2):
            estimator = Estimator(objective, federation, self.seed, agents=agents, samples=1)
            count, w = len(estimator.agents), objective.initial().double()
            began = self.clock.now()
            estimator.curvatures(w, iterations=2)
            each = (self.clock.now() - began) / (2 * count)
            if 2 * each * HVPS * count * count / 4 <= SHARE_OF_TIME * 60 * self.clock.minutes:
                break
        else:
            self.left_out.append("γ_G and γ_H: a Hessian-vector product takes too long")
            return False, measured
        assert self.fedavg is not None
        trained = self.fedavg.server["model"].double()
        models: list[tuple[Any, Any]] = [("initial", w), ("fedavg", trained)]
        for name, at in models:
            self.clock.show("curvature of agents")
            gradients = estimator.gradients(at)
            measured.append(
                Heterogeneity(
                    model=name,
                    agents=count,
                    gradient=float(gradients.mean(dim=0).norm()),
                    gamma_g=estimator.gradient_dissimilarity([at]).value,
                    gamma_h=estimator.hessian_dissimilarity([at]).value,
                    curvatures=estimator.curvatures(at),
                )
            )
        return estimator.is_smooth(w), measured

    def _halve(self, record: PilotRecord, standing: Standing | None) -> None:
        """The recommended method again, with half of the agents in training, and of the samples."""
        method = LOCAL if standing is None else recommend(record, standing).method
        if method == LOCAL or not self.stage:
            return
        rng = stream(self.seed, "pilot agents", step=1)
        half = sorted(rng.permutation(self.trained)[: max(1, len(self.trained) // 2)].tolist())
        splits = {
            "agents": _only(self.whole, half),
            "samples": _only(self.whole, self.trained, share=0.5),
        }
        for what, split in splits.items():
            if what == "agents" and len(half) == len(self.trained):
                continue
            self.clock.show(f"{method} with half of the {what}")
            try:
                setup = self._setup(method, self._with_split(split))
            except InputError:
                continue
            setup = _scaled(setup, method, record.ran[method].factor)
            entry = _Entry(setup, method, 1.0, _start(setup, method, self.seed))
            kept = self.validated
            self.validated = [agent for agent in kept if agent in split.seen] or kept
            try:
                self._advance(entry, self.stage)
            finally:
                self.validated = kept
            less = entry.by_stage[self.stage]
            if less.failure is None:
                both = record.model_copy(
                    update={
                        "tried": [record.ran[method], less.model_copy(update={"method": "half"})]
                    }
                )
                lost = gap(both, "half", method)
                about = {"what": what, "difference": lost.mean, "noise": lost.noise}
                self.halved.append(Halved.model_validate(about))

    def _record(self, measured: list[Heterogeneity], smooth: bool) -> PilotRecord:
        sizes = [len(self.whole.train[agent]) for agent in self.trained]
        measure = self.problem.measure
        return PilotRecord(
            source=self.name,
            seed=self.seed,
            minutes=self.clock.minutes,
            seconds=self.clock.seconds,
            measure=measure.name,
            higher_is_better=measure.higher_is_better,
            agents=len(self.whole.seen),
            trained=len(self.trained),
            scored=len(self.scored),
            newcomers=bool(self.newcomers),
            samples=(min(sizes), float(np.median(sizes)), max(sizes)),
            classes=len(self.base.samples.classes or ()),
            parameters=self.problem.objectives[self.seed].size,
            steps=self.steps,
            cohort=self.cohort,
            rounds=self.stage or self.first,
            rounds_configured=int(self.tables["rounds"]),
            smooth=smooth,
            heterogeneity=measured,
            tried=[self.tried[name] for name in KINDS if name in self.tried],
        )


def _config(tables: Mapping[str, Any], method: str, seed: int, steps: int) -> Any:
    """The configuration of one kind of method on the tables of a problem."""
    protocol = Protocol(search_seed=seed, seeds=(), more_seeds=(), steps=(0, steps))
    return method_config(tables, method, KINDS[method], protocol)


def _only(split: Split, agents: Sequence[int], share: float = 1.0) -> Split:
    """A split in which these agents train, the others are unseen, and no agent has a test part.

    ``share``: of every agent's training samples.
    """
    kept = set(agents)
    unseen = tuple(agent for agent in split.agents if agent not in kept)
    train = [split.train[agent] for agent in split.agents]
    if share < 1:
        train = [rows[: max(2, round(share * len(rows)))] for rows in train]
    validation = [split.validation[agent] for agent in split.agents]
    return Split(train, validation, [NONE] * len(train), split.names, unseen)


def _to_start_with(entry: _Entry, scale: float) -> dict[str, Any]:
    """What a configuration says of the method: its kind, and its step sizes.

    α is that of training where training uses it, else the one chosen for use.
    """
    algorithm = entry.setup.algorithms[entry.method]
    known = {key: value for key, (_, value) in active_settings(algorithm)}
    sizes: dict[str, Any] = {key: known[key] for key in ("meta_lr", "optimizer_lr") if key in known}
    alpha = float(known["adapt_lr"]) * (1.0 if algorithm.adaptation.steps or not scale else scale)
    sizes["adapt_lr"] = alpha
    rounded = {key: float(f"{float(value):.3g}") for key, value in sizes.items()}
    return {**KINDS[entry.method], **rounded}


def _scaled(setup: Setup, method: str, factor: float) -> Setup:
    """The setup with another step size: of the server's optimiser if it has one, else of β."""
    if factor == 1.0:
        return setup
    known = {key: value for key, (_, value) in active_settings(setup.algorithms[method])}
    key = "optimizer_lr" if "optimizer_lr" in known else "meta_lr"
    return setup_of(setup, method, {key: float(f"{factor * float(known[key]):.3g}")})


def _start(setup: Setup, method: str, seed: int) -> Progress:
    """The progress before the first round."""
    engine = setup.engines[seed].get(setup.engine_names[method])
    training = Training(setup.algorithms[method], engine, setup.config.participation)
    return training.start(engine.objective.initial())


def _rank(tried: Tried, sign: int) -> float:
    score = tried.score
    if tried.failure is not None or score is None or not np.isfinite(score):
        return -np.inf
    return sign * score
