"""The board's protocol: a method on a problem, searched and scored like every other one.

``board/protocol.md`` gives the reasons. A method is searched with :data:`TRIALS` trainings on the
seed :data:`SEARCH_SEED`, scored by validation samples of agents in training; then it is trained
with the best settings and other seeds. Everything runs in this process and without a run directory:
a training takes seconds.
"""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from nufed.algorithms import ALGORITHMS
from nufed.data import Federation
from nufed.errors import InputError, TrainingError, UpdateError, in_short
from nufed.evaluate import (
    AgentScores,
    choose_step_sizes,
    evaluate_with_choice,
    majority_class,
    preferred,
)
from nufed.lab.config import Config, load_config
from nufed.lab.config.describe import every_setting
from nufed.lab.config.problem import Given, Problem
from nufed.lab.experiment.evaluation import Evaluator
from nufed.lab.experiment.setup import Setup
from nufed.lab.runs.records import round_line
from nufed.lab.runs.tuning_record import AskedTrial, RungScore
from nufed.lab.tuning.ranges import Predictor, active_settings, matters
from nufed.lab.tuning.search import search
from nufed.lab.tuning.trials import quiet, setup_of
from nufed.lab.tuning.tune import make_plan
from nufed.server import Progress
from nufed.simulation import Training

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Tables: TypeAlias = Mapping[str, Any]

Note: TypeAlias = Callable[[dict[str, Any]], None]

TRIALS = 10  # of every method
SEARCH_SEED = 1000
SEEDS = (0, 1, 2)  # that every method is scored with
MORE_SEEDS = (3, 4)  # in addition, of methods within noise of the best by validation
STEPS = (0, 1, 3, 10)  # of fine-tuning, after which personal models are scored; the last ranks
LOCAL_STEPS = 100  # of local training at most
LOCAL_RATES = tuple(float(f"{0.001 * 1000 ** (k / (TRIALS - 1)):.3g}") for k in range(TRIALS))


def ignore(record: dict[str, Any]) -> None:
    """A listener that does nothing."""


def method_config(problem: Tables, name: str, table: Tables) -> Config:
    """The configuration of one method on a problem.

    Args:
        problem: its tables; those of ``[method]`` that this method does not have are left out, and
            ``tune.ranges`` holds the ranges of the problem.
        name: of the method.
        table: its settings, and ``rounds`` and ``participation`` if they are not the problem's.
    """
    own = dict(table)
    run = {key: own.pop(key) for key in ("rounds", "participation") if key in own}
    cls = ALGORITHMS.find(f"methods.{name}.algorithm", own.setdefault("algorithm", name))
    known = {setting.name for setting, _ in every_setting(cls)}
    shared = {key: value for key, value in problem.get("method", {}).items() if key in known}
    tune = {"budget": float(TRIALS), "per": "trial", "sampler": "random", "halvings": 0}
    return load_config(
        {
            **{k: v for k, v in problem.items() if k not in ("method", "methods", "tuned")},
            **run,
            "method": {},
            "methods": {name: {**shared, **own}},
            "seeds": [SEARCH_SEED, *SEEDS, *MORE_SEEDS],
            "eval_steps": STEPS[-1],
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

    @classmethod
    def of(
        cls,
        problem: Tables,
        name: str,
        table: Tables,
        ranges: Mapping[str, list[Any]],
        samples: Any = None,
    ) -> Contender:
        """From the tables of a problem and the settings of a method; ``samples`` if loaded."""
        config = method_config(problem, name, table)
        made = Problem.make(config, Given(), samples=samples).with_step_sizes()
        return cls(Setup.make(made), name, ranges)

    def searched(self) -> dict[str, Any]:
        """The ranges that are searched.

        Every setting that declares a range is searched, in the range of the problem if it has one.
        Step sizes without one take that of ``meta_lr``. A setting that does not change training is
        left out: the step size of fine-tuning is chosen at every evaluation.
        """
        found: dict[str, Any] = {}
        for key, (setting, _) in active_settings(self.setup.algorithms[self.name]):
            declared = setting.setting.search
            if declared is None and key not in self.ranges:
                continue
            own = self.ranges.get(key)
            if own is None and declared is not None:
                steps = self.ranges.get("meta_lr") if declared.step_size else None
                own = steps or [declared.low, declared.high]
            assert own is not None
            if len(own) > 2 or any(matters(self.setup, self.name, key, value) for value in own):
                found[key] = own
        return found

    def work(self) -> float:
        """The predicted work of a round, in gradients; a Hessian-vector product counts as two."""
        return Predictor(self.setup)(self.name, {})

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
        """Train with some settings and score by validation samples, after the last of STEPS."""
        try:
            trained = Trained.of(setup_of(self.setup, self.name, settings), self.name, SEARCH_SEED)
            scoring = trained.evaluator.scorer
            seen = sorted(trained.evaluator.setup.validated(SEARCH_SEED))
            sizes = choose_step_sizes(
                scoring(trained.progress, "validation", seen, STEPS[-1]),
                [STEPS[-1]],
                self.setup.measure,
                preferred(trained.evaluator.algorithm),
            )
        except (TrainingError, UpdateError, InputError) as error:
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
            trained = Trained.of(setup_of(self.setup, self.name, settings), self.name, seed)
        except (TrainingError, UpdateError, InputError) as error:
            return {"seed": seed, "failure": in_short(error)}
        return {"seed": seed, **trained.scores(), **trained.cost}

    def untrained(self, seed: int) -> dict[str, Any]:
        """The scores of the initial model."""
        return {"seed": seed, **Trained.of(self.setup, self.name, seed, rounds=0).scores()}

    def majority(self, seed: int) -> dict[str, Any]:
        """The scores of always predicting the agent's most frequent class."""
        agents, federation = self.setup.evaluated[seed], self.setup.federations[seed]
        scores = [majority_class(federation, agent, STEPS[-1]) for agent in agents]
        validation = federation.scoring("validation")
        seen = [majority_class(validation, a, STEPS[-1]) for a in sorted(self.setup.validated(seed))]
        return {"seed": seed, **packed_scores(scores), "validation": pack(_column(seen, 0))}

    def local(self, seed: int) -> dict[str, Any]:
        """The scores of training alone, from the initial model.

        One of :data:`LOCAL_RATES` and the number of steps are chosen by the validation loss of
        agents in training.
        """
        trained = Trained.of(self.setup, self.name, seed, rounds=0)
        scorer, steps = trained.evaluator.scorer, LOCAL_STEPS
        seen = sorted(self.setup.validated(seed))
        rate = float(trained.evaluator.algorithm.adaptation.lr or 1.0)
        scales = [each / rate for each in LOCAL_RATES]
        tried = scorer(trained.progress, "validation", seen, steps)(scales)
        losses = np.array([[s.loss for s in scores] for scores in tried]).mean(axis=1)
        losses[~np.isfinite(losses)] = np.inf
        best, stop = np.unravel_index(int(losses.argmin()), losses.shape)
        agents = self.setup.evaluated[seed]
        (scores,) = scorer(trained.progress, "test", agents, max(int(stop), STEPS[-1]))(
            [scales[best]]
        )
        at = [int(stop)] * len(STEPS)
        return {
            "seed": seed,
            **packed_scores(scores, at),
            "validation": pack(_column(tried[best], int(stop))),
            "chosen": {"adapt_lr": LOCAL_RATES[best], "steps": int(stop)},
        }

    def centroid(self, seed: int) -> dict[str, Any]:
        """The scores of the nearest class mean of an agent's raw training inputs."""
        test, agents = self.setup.federations[seed], self.setup.evaluated[seed]
        seen = sorted(self.setup.validated(seed))
        rows = _nearest(test, agents)
        unseen = set(test.split.unseen)
        result = {"seed": seed, "validation": pack(_nearest(test.scoring("validation"), seen))}
        for group in ("seen", "unseen"):
            kept = [r for a, r in zip(agents, rows, strict=True) if (a in unseen) == (group == "unseen")]
            result[group] = pack([value * len(STEPS) + [np.nan] for value in kept])
        return result


@dataclass(frozen=True)
class Trained:
    """A finished training in memory, and what it cost."""

    evaluator: Evaluator
    progress: Progress
    cost: dict[str, Any]

    @classmethod
    def of(cls, setup: Setup, name: str, seed: int, rounds: int | None = None) -> Trained:
        """Train a method with a seed, for the rounds of the configuration by default."""
        began, last = time.process_time(), setup.config.rounds if rounds is None else rounds
        engine, algorithm = setup.engines[seed].get(setup.engine_names[name]), setup.algorithms[name]
        rate, label = setup.config.participation, f"{name}, seed {seed}"
        training = Training(algorithm, engine, rate, setup.rules, setup.faults, label)
        cost = dict.fromkeys(("gradients", "hvps", "bytes"), 0)
        with quiet():
            for progress in training.rounds(training.start(engine.objective.initial()), last):
                if progress.round:
                    line = round_line(algorithm, progress)
                    cost["bytes"] += line["bytes_down"] + line["bytes_up"]
                    for key in ("gradients", "hvps"):
                        cost[key] += line[key]
        seconds = {"seconds": _short(time.process_time() - began)}
        evaluator = Evaluator(setup, engine, algorithm, STEPS[-1])
        return cls(evaluator, progress, {"rounds": last, **cost, **seconds})

    def scores(self) -> dict[str, Any]:
        """Scores of seen and unseen agents after each of STEPS, with α chosen for each of them, and
        the validation scores of seen ones after the last."""
        began, evaluator = time.process_time(), self.evaluator
        setup, seed, measure = evaluator.setup, evaluator.engine.seed, evaluator.setup.measure
        seen, prefer = sorted(setup.validated(seed)), preferred(evaluator.algorithm)
        validate = evaluator.scorer(self.progress, "validation", seen, STEPS[-1])
        evaluation = evaluate_with_choice(
            evaluator.scorer(self.progress, "test", setup.evaluated[seed], STEPS[-1]),
            validate,
            STEPS[-1],
            measure,
            prefer,
            at=STEPS[1:],
        )
        scale = evaluation.scale(STEPS[-1])
        (validation,) = validate([scale or 1.0])
        return {
            **packed_scores(evaluation.chosen or evaluation.as_trained),
            "validation": pack(_column(validation, STEPS[-1] if scale else 0)),
            "scales": [_short(evaluation.scale(steps)) for steps in STEPS[1:]],
            "evaluation_seconds": _short(time.process_time() - began),
        }


def packed_scores(scores: Sequence[AgentScores], at: Sequence[int] = STEPS) -> dict[str, str]:
    """Scores of agents seen and unseen in training: a row for each, with one column for each number
    of steps and one for the global model."""
    return {
        group: pack(
            [
                [*(s.score[k] for k in at), np.nan if s.global_score is None else s.global_score]
                for s in scores
                if s.seen == (group == "seen")
            ]
        )
        for group in ("seen", "unseen")
    }


def pack(values: Any) -> str:
    """An array as compact text: numbers in float16, compressed, in base 64.

    >>> unpack(pack([[0.5, 0.25], [1.0, 0.0]])).tolist()
    [[0.5, 0.25], [1.0, 0.0]]
    """
    array = np.asarray(values, np.float64)
    array = array.reshape(len(array), -1) if array.size else array.reshape(0, 1)
    with np.errstate(over="ignore"):  # of diverged models
        content = array.T.astype("<f2").tobytes()
    return f"{array.shape[1]}:{base64.b64encode(zlib.compress(content, 9)).decode()}"


def unpack(text: str) -> Array:
    """The inverse of :func:`pack`: a row per agent."""
    columns, _, content = text.partition(":")
    values = np.frombuffer(zlib.decompress(base64.b64decode(content)), "<f2").astype(np.float64)
    return values.reshape(int(columns), -1).T


def _rung(record: Mapping[str, Any], rounds: int) -> RungScore:
    """A trial's record as the search knows it."""
    values = {k: record[k] for k in ("score", "loss", "gradients", "hvps", "failure") if k in record}
    return RungScore(rounds=rounds, **values)


def _nearest(federation: Federation, agents: Sequence[int]) -> list[list[float]]:
    """The accuracy of the nearest class mean at every agent, on the samples that are scored."""
    found = []
    for agent in agents:
        rows, scored = federation.split.train[agent], federation.scored_rows(agent)
        inputs, targets = federation.take(rows)
        asked, right = federation.take(scored)
        points, queries = inputs.flatten(1).double(), asked.flatten(1).double()
        classes = targets.unique()
        means = torch.stack([points[targets == each].mean(dim=0) for each in classes])
        guess = classes[torch.cdist(queries, means).argmin(dim=1)]
        found.append([float((guess == right).double().mean())])
    return found


def _column(scores: Sequence[AgentScores], step: int) -> list[list[float]]:
    return [[each.score[step]] for each in scores]


def _short(value: float) -> float:
    return float(f"{value:.4g}")
