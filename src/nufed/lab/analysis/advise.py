"""Recommends method, number and size of fine-tuning steps, and the samples they need.

Choices are made on unseen agents, if some were held out from training, and on their training and
validation parts alone: nothing here reads test data. An agent adapts on a part of its samples and
is scored on the rest. Scores are accuracies, or for regression negative losses: higher is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from nufed.data import Federation, Samples
from nufed.errors import InputError
from nufed.lab.bundle import Bundle
from nufed.lab.bundle.adapting import Array, cross_validate, fine_tuned
from nufed.lab.bundle.from_run import NoBundleError, bundle_of, check_inputs
from nufed.lab.config.devices import torch_threads
from nufed.lab.config.problem import Given, Problem
from nufed.lab.runs import Estimate, Run
from nufed.lab.runs.json_files import finite, write_json
from nufed.seeding import stream


@dataclass(frozen=True)
class Point:
    """A number of steps: the score over agents, its spread, and the cost for an agent.

    ``harmed`` is the share of agents whose fine-tuned model is worse than the global one.
    """

    steps: int
    mean: float
    interval: float | None
    low: float
    high: float
    harmed: float
    gradients: int
    samples: int


@dataclass(frozen=True)
class Curve:
    """A method with ``times`` the step size of its bundle, by number of steps."""

    method: str
    times: float
    lr: float
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Against:
    """Difference to a fixed number of steps for all agents."""

    steps: int
    difference: float
    interval: float | None


@dataclass(frozen=True)
class Automatic:
    """Steps that each agent chose itself: mean score, mean number, and comparisons.

    ``best`` is against the best fixed number, chosen in hindsight on the same scores, ``default``
    against the number that the report shows.
    """

    mean: float
    steps: float
    best: Against
    default: Against


@dataclass(frozen=True)
class Amount:
    """Gain of the recommended choice with this many samples, over agents that have as many."""

    samples: int
    agents: int
    shared: float
    personal: float
    gain: float
    interval: float | None


@dataclass(frozen=True)
class Recommended:
    """The cheapest choice that is as good as the best; ``samples``: the fewest with a gain."""

    method: str
    steps: int
    lr: float
    times: float
    samples: int | None


@dataclass(frozen=True)
class LeftOut:
    """A method that the advice excludes, and why."""

    method: str
    reason: str


@dataclass(frozen=True)
class Scored:
    """The samples that choices are made on: a part of the agents that were held out, or not."""

    part: Literal["training", "validation"]
    seen: bool

    def __str__(self) -> str:
        return f"{self.part} parts of agents {'' if self.seen else 'un'}seen in training"


@dataclass(frozen=True)
class Advice:
    """Advice from a finished run on fine-tuning its global models."""

    measure: str
    agents: int
    scored: tuple[Scored, ...]
    recommended: Recommended
    curves: tuple[Curve, ...]
    auto: dict[str, Automatic]
    amounts: tuple[Amount, ...]
    majority: float | None
    training: dict[str, dict[str, float]]
    left_out: tuple[LeftOut, ...]

    @property
    def accuracy(self) -> bool:
        """Whether scores are accuracies, not losses."""
        return self.measure == "accuracy"

    @property
    def optimistic(self) -> bool:
        """Whether choices are made on samples that the models were trained on."""
        return Scored("training", seen=True) in self.scored

    @property
    def scored_on(self) -> str:
        return " and ".join(sorted(map(str, self.scored)))

    @property
    def recommended_curve(self) -> Curve:
        best = self.recommended
        return next(c for c in self.curves if (c.method, c.times) == (best.method, best.times))

    def record(self) -> dict[str, Any]:
        """For JSON, where ``shared`` is called ``global``, a keyword in Python."""
        record: dict[str, Any] = finite(asdict(self))
        record["scored"] = self.scored_on
        record["amounts"] = [
            {"global" if key == "shared" else key: value for key, value in row.items()}
            for row in record["amounts"]
        ]
        return record


@dataclass(frozen=True)
class Choice:
    """A method, a step size relative to its bundle's, and a number of steps."""

    method: str
    times: float
    steps: int


def recommend(scores: dict[tuple[str, float], Array]) -> Choice:
    """The cheapest choice that is as good as the best: within one standard error over agents.

    Fewer steps are cheaper; then the step size of the bundle, then the better score.
    ``scores`` has a row per agent and a column per number of steps, for methods and step sizes.
    """
    by_choice = {
        Choice(method, times, steps): np.nan_to_num(after[:, steps], nan=-1e9)
        for (method, times), after in scores.items()
        for steps in range(after.shape[1])
    }
    top = max(by_choice.values(), key=lambda values: float(values.mean()))

    def as_good(values: Array) -> bool:
        gaps = top - values
        noise = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        return bool(gaps.mean() <= noise)

    good = {choice: values.mean() for choice, values in by_choice.items() if as_good(values)}
    return min(good, key=lambda c: (c.steps, abs(math.log(c.times)), -good[c]))


def compare_automatic(chosen: Sequence[int], scores: Array, default: int) -> Automatic:
    """Steps that each agent chose itself, compared with fixed numbers of steps for all.

    ``scores`` has a row per agent and a column per number of steps. The best fixed number is chosen
    in hindsight, on the same scores.
    """
    automatic = scores[np.arange(len(chosen)), chosen]
    best = int(np.nan_to_num(scores.mean(axis=0), nan=-np.inf).argmax())
    loss = Estimate.of((automatic - scores[:, best]).tolist())
    gain = Estimate.of((automatic - scores[:, default]).tolist())
    return Automatic(
        float(automatic.mean()),
        float(np.mean(chosen)),
        Against(best, loss.mean, loss.half_width),
        Against(default, gain.mean, gain.half_width),
    )


def fewest_samples(amounts: Sequence[Amount]) -> int | None:
    """The fewest samples from which on the gain of adapting exceeds its interval."""
    fewest = None
    for row in reversed(amounts):
        if not (row.interval is not None and row.gain > row.interval):
            break
        fewest = row.samples
    return fewest


TIMES = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)  # step sizes tried, relative to the bundle's
AMOUNTS = (5, 10, 20, 50, 100, 200, 500)  # numbers of samples tried
HELD_OUT = 0.3  # fraction of an agent's training part, where it has no validation part
MAX_STEPS = 10

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class Case:
    """An agent of one seed: the rows that it adapts on, and those that it is scored on."""

    seed: int
    agent: int
    federation: Federation
    adapt: Array
    scored: Array


def advise(
    run: Run,
    max_steps: int | None = None,
    on_progress: OnProgress = lambda what, share: None,
    *,
    given: Given | None = None,
    trust: bool = False,
) -> Advice:
    """Advice from a finished run on fine-tuning its global models.

    Args:
        run: from :func:`nufed.load_run`.
        max_steps: the most fine-tuning steps tried.
        on_progress: called with the current step and the fraction done.
        given: the objects that were passed to :func:`nufed.run`.
        trust: allow importing the code that the run names, if it names any.
    """
    check_inputs(run)
    with torch_threads(run.config.threads):
        problem = Problem.rebuild(run.recorded, given, trust=trust)
        return _advise(run, problem, max_steps, on_progress)


def write_advice(
    run: Run,
    max_steps: int | None = None,
    on_progress: OnProgress = lambda what, share: None,
    *,
    trust: bool = False,
) -> Advice:
    """The advice from a run, which is also written to its ``advice.json``."""
    advice = advise(run, max_steps, on_progress, trust=trust)
    write_json(run.path / "advice.json", advice.record())
    return advice


def _advise(run: Run, problem: Problem, max_steps: int | None, on_progress: OnProgress) -> Advice:
    classes = bool(problem.samples.classes)
    most = max_steps or max(MAX_STEPS, 2 * run.config.steps_shown)
    seeds = sorted(set.intersection(*(set(part) for part in run.methods.values())))
    bundles, left_out = _bundles(run, problem, seeds)
    methods = list(dict.fromkeys(name for name, _ in bundles))
    if not bundles:
        listed = "; ".join(each.reason for each in left_out)
        raise InputError(f"{run.path} has no global model to fine-tune: {listed}")
    cases, scored = _cases(run, problem, seeds)
    scores: dict[tuple[str, float], Array] = {}
    auto: dict[str, Automatic] = {}
    for number, name in enumerate(methods):
        for done, times in enumerate(TIMES):
            on_progress(f"{name}, α × {times:.3g}", (number + done / len(TIMES)) / len(methods))
            scores[name, times] = np.array(
                [_curve(bundles[name, c.seed], c, most, times) for c in cases]
            )
        chosen = [_automatic(bundles[name, c.seed], c, most) for c in cases]
        default = min(most, run.config.steps_of(name)[0])
        auto[name] = compare_automatic(chosen, scores[name, 1.0], default)
    best = recommend(scores)
    amounts = tuple(_amounts(best, bundles, cases))
    rates = {name: _rate(bundles[name, seeds[0]]) for name in methods}
    return Advice(
        measure="accuracy" if classes else "loss, negative",
        agents=len(cases),
        scored=scored,
        recommended=Recommended(
            best.method,
            best.steps,
            lr=best.times * rates[best.method],
            times=best.times,
            samples=fewest_samples(amounts),
        ),
        curves=tuple(
            Curve(
                name,
                times,
                times * rates[name],
                tuple(
                    _point(after, s, bundles[name, seeds[0]].about.adapt.batch_size)
                    for s in range(most + 1)
                ),
            )
            for (name, times), after in scores.items()
        ),
        auto=auto,
        amounts=amounts,
        majority=float(np.mean([_majority(c) for c in cases])) if classes else None,
        training={name: run.costs(name) for name in methods},
        left_out=tuple(left_out),
    )


def _bundles(
    run: Run, problem: Problem, seeds: Sequence[int]
) -> tuple[dict[tuple[str, int], Bundle], list[LeftOut]]:
    """The bundle of every method and seed, and the methods that have none."""
    bundles: dict[tuple[str, int], Bundle] = {}
    left_out = []
    for name in run.methods:
        algorithm = problem.algorithms[name]
        try:
            bundles |= {
                (name, seed): bundle_of(run, name, seed, problem.objectives[seed], algorithm)
                for seed in seeds
            }
        except NoBundleError as error:
            left_out.append(LeftOut(name, str(error)))
    return bundles, left_out


def _cases(
    run: Run, problem: Problem, seeds: Sequence[int]
) -> tuple[list[Case], tuple[Scored, ...]]:
    """The agents that choices are made on, and which samples of theirs."""
    cases, kinds = [], set()
    for seed in seeds:
        federation = problem.federations[seed]
        split = federation.split
        for agent in split.unseen or split.seen:
            train, scored = np.asarray(split.train[agent]), np.asarray(split.validation[agent])
            kind = Scored("validation" if len(scored) else "training", agent not in split.unseen)
            if not len(scored):
                order = stream(seed, "advice", agent=agent).permutation(train)
                scored, train = np.split(order, [max(1, round(HELD_OUT * len(order)))])
            if len(train) < 2:
                continue
            kinds.add(kind)
            cases.append(Case(seed, agent, federation, train, scored))
    if not cases:
        raise InputError(
            f"{run.path}: no agent has enough samples to adapt on some and score the rest"
        )
    return cases, tuple(sorted(kinds, key=str))


def _curve(bundle: Bundle, case: Case, steps: int, times: float) -> list[float]:
    """Scores of an agent after 0, 1, … steps."""
    samples = case.federation.samples
    models = fine_tuned(bundle, samples, case.adapt, steps, case.agent, times)
    return [_score(bundle, samples, case.scored, w) for w in models]


def _score(bundle: Bundle, samples: Samples, rows: Array, w: Any) -> float:
    """The accuracy; without classes the negative loss."""
    inputs, targets = samples.take(rows)
    outputs = bundle.objective.predict(w, inputs)
    if samples.classes:
        return float((outputs.argmax(dim=1) == targets).double().mean())
    return -float(bundle.objective.loss(outputs, targets))


def _automatic(bundle: Bundle, case: Case, most: int) -> int:
    """The steps that ``steps="auto"`` chooses for an agent, from the rows it adapts on alone."""
    samples = case.federation.samples
    inputs, targets = samples.inputs, samples.targets
    assert not isinstance(inputs, tuple | dict)
    adapt_on = bundle.about.samples(inputs[case.adapt], targets[case.adapt])  # type: ignore[index]
    return cross_validate(bundle, adapt_on, "auto", most, case.agent).steps


def _amounts(
    best: Choice, bundles: dict[tuple[str, int], Bundle], cases: Sequence[Case]
) -> Iterator[Amount]:
    """Gains of the recommended choice by number of samples, over agents that have as many."""
    for amount in AMOUNTS:
        able = [c for c in cases if len(c.adapt) >= amount]
        if not able:
            return
        curves = []
        for case in able:
            order = stream(case.seed, "amount", agent=case.agent).permutation(case.adapt)
            fewer = Case(case.seed, case.agent, case.federation, order[:amount], case.scored)
            bundle = bundles[best.method, case.seed]
            curves.append(_curve(bundle, fewer, max(1, best.steps), best.times))
        shared, personal = np.array(curves)[:, 0], np.array(curves)[:, -1]
        gain = Estimate.of((personal - shared).tolist())
        means = float(shared.mean()), float(personal.mean())
        yield Amount(amount, len(able), *means, gain.mean, gain.half_width)


def _point(scores: Array, steps: int, batch_size: int) -> Point:
    """One number of steps: the score over agents, its spread, and the cost for an agent."""
    personal, shared = scores[:, steps], scores[:, 0]
    low, high = np.quantile(personal, [0.1, 0.9])
    return Point(
        steps,
        float(personal.mean()),
        Estimate.of(personal.tolist()).half_width,
        float(low),
        float(high),
        harmed=float((personal < shared).mean()),
        gradients=steps,
        samples=steps * batch_size,
    )


def _majority(case: Case) -> float:
    targets = case.federation.samples.targets
    most = targets[case.adapt].bincount().argmax()
    return float((targets[case.scored] == most).double().mean())


def _rate(bundle: Bundle) -> float:
    """The step size; the mean of learned ones."""
    lr = bundle.about.adapt.lr
    if isinstance(lr, dict):
        return float(np.mean(list(lr.values())))
    rate = bundle.rate()
    return float(rate.mean()) if isinstance(rate, Tensor) else rate
