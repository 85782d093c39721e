"""How many steps, how large, on how much data: what to tell the agents of a federation.

Choices are made on agents that training did not see, if some were held out, and on their training
and validation parts alone: nothing here reads test data. An agent adapts on a part of what it has
and is scored on the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nufed.algorithms import GMeta
from nufed.bundle import Bundle
from nufed.bundle.adapting import Array, cross_validate, fine_tuned
from nufed.bundle.of_run import bundle_of, can_be_bundled
from nufed.data import Federation, Samples
from nufed.errors import InputError
from nufed.runs import Estimate, Run
from nufed.runs.build import (
    build_federation,
    build_loss,
    build_module,
    build_objective,
    build_samples,
)
from nufed.runs.schema import OWN
from nufed.runs.trust import require_trust
from nufed.seeding import stream
from nufed.threads import torch_threads

TIMES = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)  # step sizes tried, in units of the bundle's
AMOUNTS = (5, 10, 20, 50, 100, 200, 500)  # samples tried
HELD_BACK = 0.3  # of an agent's training part, where it has no validation part
MAX_STEPS = 10

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class Place:
    """An agent of one seed: the rows that it adapts on, and those that it is scored on."""

    seed: int
    agent: int
    federation: Federation
    adapt: Array
    scored: Array


@dataclass(frozen=True)
class Choice:
    """A method, a step size in units of its bundle's, and a number of steps."""

    method: str
    times: float
    steps: int


def advise(
    run: Run,
    max_steps: int | None = None,
    on_progress: OnProgress = lambda what, share: None,
    *,
    trust: bool = False,
) -> dict[str, Any]:
    """What a finished run tells about fine-tuning its models, as plain data.

    Args:
        run: as :func:`nufed.load_run` gives it.
        max_steps: the most fine-tuning steps tried.
        on_progress: called with what is being done and the share that is done.
        trust: allow importing the functions that the run names, if it names any.
    """
    require_trust(run.path, run.config, trust)
    with torch_threads(run.config.threads):
        return _advise(run, max_steps, on_progress)


def _advise(run: Run, max_steps: int | None, on_progress: OnProgress) -> dict[str, Any]:
    if OWN in (run.config.data.source, run.config.model.name, run.config.loss):
        raise InputError(
            f"{run.path} was given its data, model or loss as objects, which can't be made again "
            "from its directory: name them as package.module:function in its configuration"
        )
    algorithms = run.config.algorithms()
    methods = [name for name in run.methods if isinstance(algorithms[name], GMeta)]
    if not methods or not can_be_bundled(run):
        raise InputError(f"{run.path} has no method whose models are fine-tuned by plain steps")
    most = max_steps or max(MAX_STEPS, 2 * run.config.steps_shown)
    samples = build_samples(run.config.data)
    seeds = sorted(set.intersection(*(set(run.methods[name]) for name in methods)))
    places, kind = _places(run, samples, seeds)
    scores: dict[tuple[str, float], Array] = {}
    auto: dict[str, dict[str, Any]] = {}
    bundles: dict[tuple[str, int], Bundle] = {}
    for number, name in enumerate(methods):
        bundles |= {(name, seed): _bundle(run, name, seed, samples) for seed in seeds}
        for place, times in enumerate(TIMES):
            on_progress(f"{name}, α × {times:.3g}", (number + place / len(TIMES)) / len(methods))
            scores[name, times] = np.array(
                [_curve(bundles[name, p.seed], p, most, times) for p in places]
            )
        chosen = [_automatic(bundles[name, p.seed], p, most) for p in places]
        default = min(most, run.config.steps_of(name)[0])
        auto[name] = compare_automatic(chosen, scores[name, 1.0], default)
    best = recommend(scores)
    amounts = list(_amounts(best, bundles, places))
    return {
        "measure": "accuracy" if samples.classes else "loss, negative",
        "agents": len(places),
        "scored": kind,
        "recommended": {
            "method": best.method,
            "steps": best.steps,
            "lr": best.times * _rate(bundles[best.method, seeds[0]]),
            "times": best.times,
            "samples": enough(amounts),
        },
        "curves": [
            {
                "method": name,
                "times": times,
                "lr": times * _rate(bundles[name, seeds[0]]),
                "points": [_point(own, s, algorithms[name]) for s in range(most + 1)],
            }
            for (name, times), own in scores.items()
        ],
        "auto": auto,
        "amounts": amounts,
        "majority": float(np.mean([_majority(p) for p in places])) if samples.classes else None,
        "training": {name: run.costs(name) for name in methods},
    }


def recommend(scores: dict[tuple[str, float], Array]) -> Choice:
    """The cheapest choice that is as good as the best: within one standard error over agents.

    Fewer steps are cheaper; then the step size of the bundle, then the better score.
    ``scores`` has a row per agent and a column per number of steps, for methods and step sizes.
    """
    found = {
        Choice(method, times, steps): np.nan_to_num(own[:, steps], nan=-1e9)
        for (method, times), own in scores.items()
        for steps in range(own.shape[1])
    }
    top = max(found.values(), key=lambda values: float(values.mean()))

    def as_good(values: Array) -> bool:
        gaps = top - values
        noise = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        return bool(gaps.mean() <= noise)

    good = {choice: values.mean() for choice, values in found.items() if as_good(values)}
    return min(good, key=lambda c: (c.steps, abs(math.log(c.times)), -good[c]))


def compare_automatic(chosen: Sequence[int], scores: Array, default: int) -> dict[str, Any]:
    """Steps that agents chose by themselves, beside the same number for all of them.

    ``scores`` has a row per agent and a column per number of steps. The best number for all is
    found on these very scores, which no agent could have known.
    """
    own = scores[np.arange(len(chosen)), chosen]
    best = int(np.nan_to_num(scores.mean(axis=0), nan=-np.inf).argmax())
    loss = Estimate.of((own - scores[:, best]).tolist())
    gain = Estimate.of((own - scores[:, default]).tolist())
    return {
        "mean": float(own.mean()),
        "steps": float(np.mean(chosen)),
        "best": {"steps": best, "difference": loss.mean, "interval": loss.half_width},
        "default": {"steps": default, "difference": gain.mean, "interval": gain.half_width},
    }


def enough(amounts: Sequence[dict[str, Any]]) -> int | None:
    """The fewest samples from which on adapting gained something beyond its interval."""
    fewest = None
    for row in reversed(amounts):
        if not (row["interval"] is not None and row["gain"] > row["interval"]):
            break
        fewest = int(row["samples"])
    return fewest


def _places(run: Run, samples: Samples, seeds: Sequence[int]) -> tuple[list[Place], str]:
    """The agents that choices are made on, and what they are."""
    found, kinds = [], set()
    for seed in seeds:
        federation = build_federation(run.config, samples, seed)
        split = federation.split
        for agent in split.unseen or split.seen:
            train, scored = np.asarray(split.train[agent]), np.asarray(split.validation[agent])
            part = "validation" if len(scored) else "training"
            if not len(scored):
                order = stream(seed, "advice", agent=agent).permutation(train)
                scored, train = np.split(order, [max(1, round(HELD_BACK * len(order)))])
            if len(train) < 2:
                continue
            kinds.add(f"{part} parts of agents {'un' * (agent in split.unseen)}seen in training")
            found.append(Place(seed, agent, federation, train, scored))
    if not found:
        raise InputError(f"{run.path}: no agent has enough samples to adapt on some of them")
    return found, " and ".join(sorted(kinds))


def _bundle(run: Run, method: str, seed: int, samples: Samples) -> Bundle:
    module = build_module(run.config, samples, seed)
    objective = build_objective(run.config, module, build_loss(run.config, samples))
    return bundle_of(run, method, seed, objective)


def _curve(bundle: Bundle, place: Place, steps: int, times: float) -> list[float]:
    """Scores of an agent after 0, 1, … steps."""
    samples = place.federation.samples
    models = fine_tuned(bundle, samples, place.adapt, steps, place.agent, times)
    return [_score(bundle, samples, place.scored, w) for w in models]


def _score(bundle: Bundle, samples: Samples, rows: Array, w: Any) -> float:
    """The share of right answers; without classes the loss, negative."""
    inputs, targets = samples.take(rows)
    outputs = bundle.objective.predict(w, inputs)
    if samples.classes:
        return float((outputs.argmax(dim=1) == targets).double().mean())
    return -float(bundle.objective.loss(outputs, targets))


def _automatic(bundle: Bundle, place: Place, most: int) -> int:
    """The steps that ``steps="auto"`` takes for an agent, from what it adapts on alone."""
    samples = place.federation.samples
    inputs, targets = samples.inputs, samples.targets
    assert not isinstance(inputs, tuple | dict)
    own = bundle.about.samples(inputs[place.adapt], targets[place.adapt])  # type: ignore[index]
    return cross_validate(bundle, own, "auto", most, place.agent).steps


def _amounts(
    best: Choice, bundles: dict[tuple[str, int], Bundle], places: Sequence[Place]
) -> Iterator[dict[str, Any]]:
    """What the recommended choice gains with so many samples, over agents that have as many."""
    for amount in AMOUNTS:
        able = [p for p in places if len(p.adapt) >= amount]
        if not able:
            return
        curves = []
        for place in able:
            order = stream(place.seed, "amount", agent=place.agent).permutation(place.adapt)
            fewer = Place(place.seed, place.agent, place.federation, order[:amount], place.scored)
            bundle = bundles[best.method, place.seed]
            curves.append(_curve(bundle, fewer, max(1, best.steps), best.times))
        before, after = np.array(curves)[:, 0], np.array(curves)[:, -1]
        gain = Estimate.of((after - before).tolist())
        yield {
            "samples": amount,
            "agents": len(able),
            "before": float(before.mean()),
            "after": float(after.mean()),
            "gain": gain.mean,
            "interval": gain.half_width,
        }


def _point(scores: Array, steps: int, algorithm: Any) -> dict[str, Any]:
    """One number of steps: the score over agents, its spread, and what it costs an agent."""
    own, before = scores[:, steps], scores[:, 0]
    low, high = np.quantile(own, [0.1, 0.9])
    return {
        "steps": steps,
        "mean": float(own.mean()),
        "interval": Estimate.of(own.tolist()).half_width,
        "low": float(low),
        "high": float(high),
        "harmed": float((own < before).mean()),
        "gradients": steps,
        "samples": steps * algorithm.batch_size,
    }


def _majority(place: Place) -> float:
    targets = place.federation.samples.targets
    most = targets[place.adapt].bincount().argmax()
    return float((targets[place.scored] == most).double().mean())


def _rate(bundle: Bundle) -> float:
    """The step size; of learned ones their mean."""
    lr = bundle.about.adapt.lr
    return lr if isinstance(lr, float) else float(np.mean(list(lr.values())))
