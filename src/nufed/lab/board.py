"""The board's protocol: a method on a problem, searched and scored like every other one.

``board/protocol.md`` gives the reasons. A method is searched with the trainings and seeds of a
:class:`Protocol`, scored by validation samples of agents in training; then it is trained
with the best settings and other seeds. Everything runs in this process and without a run directory:
a training takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from nufed.algorithms import ALGORITHMS
from nufed.errors import InputError, NufedError, in_short, shown
from nufed.evaluate import (
    AgentScores,
    ByScale,
    StepSizes,
    choose_step_sizes,
    evaluate_with_choice,
    majority_class,
    nearest_centroid,
    preferred,
)
from nufed.lab.analysis.places import (
    Group,
    Place,
    differences,
    mean,
    pack,
    resamples_of,
    scores_of,
    unpack,
    worst_tenth,
)
from nufed.lab.config import Config, load_config, presets
from nufed.lab.config.describe import every_setting
from nufed.lab.config.load import read_tables
from nufed.lab.config.methods import named_after
from nufed.lab.config.problem import Given, Problem
from nufed.lab.experiment.evaluation import Evaluator
from nufed.lab.experiment.setup import Setup
from nufed.lab.runs.records import round_line
from nufed.lab.runs.tuning_record import HVP_WORK, AskedTrial, RungScore
from nufed.lab.tuning.ranges import Predictor, active_settings, agent_update, matters
from nufed.lab.tuning.search import search
from nufed.lab.tuning.trials import errors_only, setup_of
from nufed.lab.tuning.tune import make_plan
from nufed.registry import suggest
from nufed.server import Progress, cohort_size
from nufed.simulation import Training

Tables: TypeAlias = Mapping[str, Any]

Note: TypeAlias = Callable[[dict[str, Any]], None]

PRESETS = "board/"  # before the names of presets that the board tuned


@dataclass(frozen=True)
class Protocol:
    """The numbers of the protocol.

    Args:
        trials: of every method.
        search_seed: of their trainings; not among those that are scored.
        seeds: that every method is scored with.
        more_seeds: in addition, of methods within noise of the best by validation.
        steps: numbers of fine-tuning steps after which personal models are scored; the last ranks.
        local_steps: of training alone, at most.
    """

    trials: int = 10
    search_seed: int = 1000
    seeds: tuple[int, ...] = (0, 1, 2)
    more_seeds: tuple[int, ...] = (3, 4)
    steps: tuple[int, ...] = (0, 1, 3, 10)
    local_steps: int = 100

    @property
    def last(self) -> int:
        return self.steps[-1]


PROTOCOL = Protocol()


def ignore(record: dict[str, Any]) -> None:
    """A listener that does nothing."""


def method_config(
    problem: Tables, name: str, table: Tables, protocol: Protocol = PROTOCOL
) -> Config:
    """The configuration of one method on a problem.

    Args:
        problem: its tables; those of ``[method]`` that this method does not have are left out, and
            ``tune.ranges`` holds the ranges of the problem.
        name: of the method.
        table: its settings, and ``rounds`` and ``participation`` if they are not the problem's.
    """
    settings = dict(table)
    run: dict[str, Any] = {
        key: settings.pop(key) for key in ("rounds", "participation") if key in settings
    }
    settings["algorithm"] = settings.get("algorithm") or named_after(name)
    cls = ALGORITHMS.find(f"methods.{name}.algorithm", settings["algorithm"])
    known = {setting.name for setting, _ in every_setting(cls)}
    shared = {key: value for key, value in problem.get("method", {}).items() if key in known}
    tune = {"budget": float(protocol.trials), "per": "trial", "sampler": "random", "halvings": 0}
    return load_config(
        {
            **{k: v for k, v in problem.items() if k not in ("method", "methods", "tuned")},
            **run,
            "method": {},
            "methods": {name: {**shared, **settings}},
            "seeds": [protocol.search_seed, *protocol.seeds, *protocol.more_seeds],
            "eval_steps": protocol.last,
            "baselines": [],
            "workers": 1,
            "tune": tune,
        }
    )


@dataclass
class Contender:
    """A method on a problem, ready to be searched and scored.

    Args:
        setup: of the configuration that :func:`method_config` makes.
        name: of the method.
        ranges: of settings: those that the problem or the method gives. Other settings that declare
            a range are searched, too.
    """

    setup: Setup
    name: str
    ranges: Mapping[str, list[Any]] = field(default_factory=dict)
    protocol: Protocol = PROTOCOL

    @classmethod
    def of(
        cls,
        problem: Tables,
        name: str,
        table: Tables,
        ranges: Mapping[str, list[Any]],
        samples: Any = None,
        protocol: Protocol = PROTOCOL,
    ) -> Contender:
        """A contender from the tables of a problem and a method; ``samples`` if loaded."""
        config = method_config(problem, name, table, protocol)
        made = Problem.make(config, Given(), samples=samples).with_step_sizes()
        return cls(Setup.make(made), name, ranges, protocol)

    def searched(self) -> dict[str, Any]:
        """The ranges that are searched.

        Every setting that declares a range is searched, in the range of the problem if it has one.
        Step sizes without one take that of ``meta_lr``. A setting that does not change training is
        left out: the step size of fine-tuning is chosen at every evaluation.
        """
        searched: dict[str, Any] = {}
        for key, (setting, _) in active_settings(self.setup.algorithms[self.name]):
            declared = setting.setting.search
            if declared is None and key not in self.ranges:
                continue
            limits = self.ranges.get(key)
            if limits is None and declared is not None:
                steps = self.ranges.get("meta_lr") if declared.step_size else None
                limits = steps or [declared.low, declared.high]
            assert limits is not None
            if len(limits) > 2 or any(
                matters(self.setup, self.name, key, value) for value in limits
            ):
                searched[key] = limits
        return searched

    def work(self, hvp: float = HVP_WORK) -> float:
        """The predicted work of a round, in gradients, of which a Hessian-vector product counts as
        ``hvp``."""
        setup, algorithm = self.setup, self.setup.algorithms[self.name]
        config = setup.config
        seen = len(setup.federations[config.seeds[0]].split.seen)
        rounds = sorted({1, (config.rounds + 1) // 2, config.rounds})
        costs = [agent_update(setup, algorithm, k).cost for k in rounds]
        work = sum(cost.gradients + hvp * cost.hvps for cost in costs) / len(rounds)
        return cohort_size(seen, config.participation) * work

    def search(
        self, known: Sequence[Mapping[str, Any]] = (), note: Note = ignore
    ) -> list[dict[str, Any]]:
        """All trials, in their order; the best one's settings are the choice.

        Args:
            known: trials of an interrupted search, which are not trained again.
            note: called with each new trial.
        """
        tune = self.setup.config.tune.model_copy(update={"methods": {self.name: self.searched()}})
        config = self.setup.config.model_copy(update={"tune": tune})
        plan = make_plan(config, self.setup, Predictor(self.setup), None, "board")
        records: list[dict[str, Any]] = []

        def train(asked: Sequence[AskedTrial], rounds: int) -> list[RungScore]:
            for each in asked:
                done = next((k for k in known if k["settings"] == each.settings), None)
                if done is None:
                    done = {"settings": each.settings, **self._trial(each.settings)}
                    note(done)
                records.append(dict(done))
            return [_rung(record, rounds) for record in records[-len(asked) :]]

        search(plan, Predictor(self.setup), train, lambda trial: None)
        return records

    def best(self, trials: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The settings of the best trial; None if all failed."""
        higher, rounds = self.setup.measure.higher_is_better, self.setup.config.rounds
        scored = [each for each in trials if "failure" not in each]
        if not scored:
            return None
        settings: dict[str, Any] = max(scored, key=lambda t: _rung(t, rounds).rank(higher))[
            "settings"
        ]
        return settings

    def _trial(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Train with some settings and score by validation samples, after the last steps."""
        try:
            trained = self._trained(self.protocol.search_seed, settings)
            sizes = trained.step_sizes()
        except NufedError as error:
            return {"failure": in_short(error)}
        if sizes is None:
            raise InputError("the board's methods are chosen on validation samples: there are none")
        (choice,) = sizes.chosen
        if not (np.isfinite(choice.score) and np.isfinite(choice.loss)):
            return {"failure": "the validation score is not finite", **trained.cost}
        return {"score": _short(choice.score), "loss": _short(choice.loss), **trained.cost}

    def score(self, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Train with these settings and a seed, and score all evaluated agents."""
        try:
            trained = self._trained(seed, settings)
        except NufedError as error:
            return {"seed": seed, "failure": in_short(error)}
        return {"seed": seed, **trained.scores(), **trained.cost}

    def _trained(
        self, seed: int, settings: Mapping[str, Any] | None = None, rounds: int | None = None
    ) -> Trained:
        setup = self.setup if settings is None else setup_of(self.setup, self.name, settings)
        return Trained.of(setup, self.name, seed, self.protocol, rounds)

    def untrained(self, seed: int) -> dict[str, Any]:
        """The scores of the initial model."""
        return {"seed": seed, **self._trained(seed, rounds=0).scores()}

    def majority(self, seed: int) -> dict[str, Any]:
        """The scores of always predicting the agent's most frequent class."""
        few = self.setup.measure.resampled(len(self.setup.evaluated[seed])).resamples
        return self._guessed(majority_class, seed, few)

    def centroid(self, seed: int) -> dict[str, Any]:
        """The scores of the nearest class mean of an agent's raw training inputs."""
        if not isinstance(self.setup.samples.inputs, Tensor):
            raise InputError("the baseline centroid needs inputs of one tensor")
        return self._guessed(nearest_centroid, seed)

    def _guessed(
        self, guess: Callable[..., AgentScores], seed: int, resamples: int = 0
    ) -> dict[str, Any]:
        """The record of a null baseline that no model predicts."""
        federation = self.setup.federations[seed]
        scores = [guess(federation, a, 0, resamples) for a in self.setup.evaluated[seed]]
        validation = federation.scoring("validation")
        seen = [guess(validation, agent, 0) for agent in sorted(self.setup.validated(seed))]
        return self._constant(seed, scores, 0, _column(seen, 0))

    def _constant(
        self, seed: int, scores: Sequence[AgentScores], step: int, validation: Any
    ) -> dict[str, Any]:
        """A record of scores that do not depend on the number of steps shown."""
        packed = packed_scores(scores, [step] * len(self.protocol.steps))
        return {"seed": seed, **packed, "validation": pack(validation)}

    def local(self, seed: int) -> dict[str, Any]:
        """The scores of training alone, from the initial model.

        The step size and the number of steps are chosen by the validation loss of
        agents in training.
        """
        trained = self._trained(seed, rounds=0)
        scorer, steps = trained.evaluator.scorer, self.protocol.local_steps
        low, high = self.ranges["adapt_lr"]
        rates = np.geomspace(low / 3, high, self.protocol.trials).tolist()
        seen = sorted(self.setup.validated(seed))
        rate = float(trained.evaluator.algorithm.adaptation.lr or 1.0)
        scales = [each / rate for each in rates]
        tried = scorer(trained.progress, "validation", seen, steps)(scales)
        losses = np.array([[s.loss for s in scores] for scores in tried]).mean(axis=1)
        losses[~np.isfinite(losses)] = np.inf
        best, stop = np.unravel_index(int(losses.argmin()), losses.shape)
        agents = self.setup.evaluated[seed]
        measure = self.setup.measure.resampled(len(agents))
        (scores,) = scorer(trained.progress, "test", agents, int(stop), measure)([scales[best]])
        record = self._constant(seed, scores, int(stop), _column(tried[best], int(stop)))
        return {**record, "chosen": {"adapt_lr": _short(rates[best]), "steps": int(stop)}}


@dataclass(frozen=True)
class Trained:
    """A finished training in memory, and what it cost."""

    evaluator: Evaluator
    progress: Progress
    cost: dict[str, Any]
    protocol: Protocol

    @classmethod
    def of(
        cls, setup: Setup, name: str, seed: int, protocol: Protocol, rounds: int | None = None
    ) -> Trained:
        """Train a method with a seed, for the rounds of the configuration by default."""
        began, last = time.process_time(), setup.config.rounds if rounds is None else rounds
        engine, algorithm = (
            setup.engines[seed].get(setup.engine_names[name]),
            setup.algorithms[name],
        )
        rate, label = setup.config.participation, f"{name}, seed {seed}"
        training = Training(algorithm, engine, rate, setup.rules, setup.faults, label)
        cost = dict.fromkeys(("gradients", "hvps", "bytes"), 0)
        with errors_only():
            for progress in training.rounds(training.start(engine.objective.initial()), last):
                if progress.round:
                    line = round_line(algorithm, progress)
                    cost["bytes"] += line["bytes_down"] + line["bytes_up"]
                    for key in ("gradients", "hvps"):
                        cost[key] += line[key]
        seconds = {"seconds": _short(time.process_time() - began)}
        evaluator = Evaluator(setup, engine, algorithm, protocol.last)
        return cls(evaluator, progress, {"rounds": last, **cost, **seconds}, protocol)

    def _validation(self) -> ByScale:
        """Scores seen agents on their validation samples."""
        setup, seed = self.evaluator.setup, self.evaluator.engine.seed
        seen = sorted(setup.validated(seed))
        return self.evaluator.scorer(self.progress, "validation", seen, self.protocol.last)

    def step_sizes(self) -> StepSizes | None:
        """The step size of fine-tuning for the last number of steps, and its validation score."""
        measure, prefer = self.evaluator.setup.measure, preferred(self.evaluator.algorithm)
        return choose_step_sizes(self._validation(), [self.protocol.last], measure, prefer)

    def scores(self) -> dict[str, Any]:
        """Scores of seen and unseen agents after each number of steps, with α chosen for each, and
        the validation scores of seen ones after the last."""
        began, evaluator, last = time.process_time(), self.evaluator, self.protocol.last
        setup, steps = evaluator.setup, self.protocol.steps
        agents = setup.evaluated[evaluator.engine.seed]
        resampled = setup.measure.resampled(len(agents))
        evaluation = evaluate_with_choice(
            evaluator.scorer(self.progress, "test", agents, last, resampled),
            self._validation(),
            last,
            setup.measure,
            preferred(evaluator.algorithm),
            at=steps[1:],
        )
        scale = evaluation.scale(last)
        (validation,) = self._validation()([scale or 1.0])
        return {
            **packed_scores(evaluation.chosen or evaluation.as_trained, steps),
            "validation": pack(_column(validation, last if scale else 0)),
            "scales": [_short(evaluation.scale(k)) for k in steps[1:]],
            "evaluation_seconds": _short(time.process_time() - began),
        }


def packed_scores(scores: Sequence[AgentScores], at: Sequence[int]) -> dict[str, Any]:
    """Scores of agents seen and unseen in training: a row for each, with one column for each number
    of steps and one for the global model. Of few agents also those on resamples, after the last."""
    groups = {
        name: [s for s in scores if s.seen == (name == "seen")] for name in ("seen", "unseen")
    }
    packed: dict[str, Any] = {
        name: pack(
            [
                [*(s.score[k] for k in at), np.nan if s.global_score is None else s.global_score]
                for s in of_group
            ]
        )
        for name, of_group in groups.items()
    }
    if all(s.resampled for s in scores):
        packed["resampled"] = {
            name: pack([s.resampled[at[-1]] for s in of_group]) for name, of_group in groups.items()
        }
    return packed


def _rung(record: Mapping[str, Any], rounds: int) -> RungScore:
    """A trial's record as the search knows it."""
    values = {
        k: record[k] for k in ("score", "loss", "gradients", "hvps", "failure") if k in record
    }
    return RungScore(rounds=rounds, **values)


def _column(scores: Sequence[AgentScores], step: int) -> list[list[float]]:
    return [[each.score[step]] for each in scores]


def _short(value: float) -> float:
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class Row:
    """A method on a problem of the board, as ``nufed board compare`` prints it.

    Args:
        name: of the method.
        steps: the numbers of fine-tuning steps; ``scores`` are after each of them.
        group: of agents that ``scores`` and ``worst_tenth`` are of; ``seen`` is that of agents in
            training after the last steps.
        place: the difference to the board's best method; None for that method itself.
        record: trials and scores, as in ``board/results``.
    """

    name: str
    steps: Sequence[int]
    group: Group
    scores: Sequence[float]
    worst_tenth: float
    seen: float
    place: Place | None
    record: Mapping[str, Any]


def compare(
    problem: str,
    source: str | Path | Mapping[str, Any],
    say: Callable[[str], None] = lambda text: None,
    protocol: Protocol = PROTOCOL,
) -> list[Row]:
    """Put methods of one's own on a problem of the board: the same search, seeds and scores.

    The board's best method is trained with its tuned settings and the same seeds, for paired
    differences.

    Args:
        problem: of the board, such as ``heart``; its preset has the tuned methods, best first.
        source: a configuration whose ``[methods]`` are put there; ``[tune.methods.NAME]`` has the
            ranges of settings that declare none, or other ones.
        say: called with what is being done.
        protocol: its numbers.
    """
    tables, mine = _tables_of(problem), read_tables(source)
    if not mine.get("methods"):
        raise InputError(f"{source} has no [methods.NAME]: name at least one to compare")
    best = next(iter(tables["methods"]))
    records: dict[str, dict[str, Any]] = {}
    higher = True
    for name, table in {**mine["methods"], f"{best} (board)": None}.items():
        settings = tables["methods"][best] if table is None else table
        given = {} if table is None else mine.get("tune", {}).get("methods", {}).get(name, {})
        key, ranges = best if table is None else name, {**tables["tune"]["ranges"], **given}
        contender = Contender.of(tables, key, settings, ranges, protocol=protocol)
        higher = contender.setup.measure.higher_is_better
        chosen: Mapping[str, Any] | None = {}
        if table is not None:
            say(f"{name}: {protocol.trials} trials on {problem}")
            trials = contender.search()
            chosen = contender.best(trials)
            records[name] = {"trials": trials, "chosen": chosen}
            if chosen is None:
                raise InputError(f"methods.{name}: no trial succeeded: {trials[0]['failure']}")
        say(f"{name}: {len(protocol.seeds)} seeds")
        seeds = [contender.score(chosen or {}, seed) for seed in protocol.seeds]
        records[name] = {**records.get(name, {}), "seeds": seeds}
    return _rows(records, protocol, higher)


def _tables_of(problem: str) -> dict[str, Any]:
    known = [name.removeprefix(PRESETS) for name in presets() if name.startswith(PRESETS)]
    if problem not in known:
        raise InputError(
            f"{shown(problem)} is not a measured problem of the board: use one of "
            f"{', '.join(known) or 'none yet (run make board)'}{suggest(problem, known)}"
        )
    return read_tables(f"{PRESETS}{problem}")


def _rows(records: Mapping[str, Mapping[str, Any]], protocol: Protocol, higher: bool) -> list[Row]:
    for name, record in records.items():
        for seed in record["seeds"]:
            if "failure" in seed:
                raise InputError(f"{name}, seed {seed['seed']}: {seed['failure']}")
    first = next(iter(records.values()))["seeds"][0]
    group: Group = "unseen" if len(unpack(first["unseen"])) else "seen"
    last = len(protocol.steps) - 1
    scores = {name: scores_of([record], group, last) for name, record in records.items()}
    best = list(records)[-1]
    resampled = {name: resamples_of([record], group) for name, record in records.items()}
    places = differences(scores, best, resampled)
    return [
        Row(
            name,
            protocol.steps,
            group,
            [mean(scores_of([record], group, k), protocol.seeds) for k in range(last + 1)],
            worst_tenth(scores[name], protocol.seeds, higher),
            mean(scores_of([record], "seen", last), protocol.seeds),
            places.get(name),
            record,
        )
        for name, record in records.items()
    ]
