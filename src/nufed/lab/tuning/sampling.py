"""Proposes the settings of trials: at random, on a grid, or by Optuna's TPE.

A proposal is a function of the search's seed, the batch and the trials finished before, and of
nothing else, so that a resumed search repeats its proposals without a stored random state. Methods
with the same ranges get the same random proposals.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

from nufed.errors import InputError
from nufed.lab.config.schema import SamplerName
from nufed.lab.runs.tuning_record import Range, Trial
from nufed.seeding import stream

Settings: TypeAlias = dict[str, Any]
MAX_DRAWS = 200  # at random, for one proposal that was not tried before
TPE_DRAWS = 3  # per proposal


def resolve_sampler(wanted: str) -> SamplerName:
    """The sampler's name; ``auto`` is tpe where Optuna is installed."""
    installed = find_spec("optuna") is not None
    if wanted == "tpe" and not installed:
        raise InputError(
            'tune.sampler = "tpe": needs Optuna; `pip install "nufed[tune]"`, or use "random"'
        )
    if wanted == "auto":
        return "tpe" if installed else "random"
    named: SamplerName = wanted  # type: ignore[assignment]
    return named


def propose(
    sampler: SamplerName,
    ranges: Sequence[Range],
    configured: Mapping[str, Any],
    tried: Sequence[Trial],
    number: int,
    *,
    seed: int,
    batch: int,
    higher_is_better: bool,
    first: Sequence[Settings] = (),
) -> list[Settings]:
    """Up to ``number`` settings that were not tried before; none if there are no others.

    Args:
        sampler: how they are drawn.
        ranges: what is searched; without any, the settings as configured are the only proposal.
        configured: the settings as configured, the first proposal if they lie in the ranges.
        tried: the finished trials of this method.
        number: how many.
        seed, batch: of the search, and of the batch.
        higher_is_better: of scores.
        first: proposals that come before those of the sampler.
    """
    known = [trial.settings for trial in tried]
    found: list[Settings] = []
    if not batch and all(own.contains(configured[own.setting]) for own in ranges):
        found.append({own.setting: configured[own.setting] for own in ranges})
    if not ranges:
        return found if not batch else []
    drawn = _grid(ranges, seed) if sampler == "grid" else _random(ranges, number, seed, batch)
    if sampler == "tpe" and tried:
        model = _tpe(ranges, tried, number, seed, batch, higher_is_better)
        drawn = itertools.chain(model, drawn)  # at random where TPE repeats itself
    for settings in itertools.chain(first, drawn):
        if len(found) >= number:
            break
        if settings not in found and settings not in known:
            found.append(settings)
    return found[:number]


def _random(ranges: Sequence[Range], number: int, seed: int, batch: int) -> Iterator[Settings]:
    """Independent draws, log-uniform where a range is logarithmic."""
    for draw in range(MAX_DRAWS * number):
        positions = stream(seed, "tuned settings", batch, step=draw).random(len(ranges))
        yield {own.setting: own.at(float(u)) for own, u in zip(ranges, positions, strict=True)}


def _grid(ranges: Sequence[Range], seed: int) -> Iterator[Settings]:
    """All points of the grid in a random order, so that a part of them covers it evenly."""
    points = list(itertools.product(*(own.grid() for own in ranges)))
    for place in stream(seed, "order of the grid").permutation(len(points)):
        yield {own.setting: v for own, v in zip(ranges, points[place], strict=True)}


def _tpe(
    ranges: Sequence[Range],
    tried: Sequence[Trial],
    number: int,
    seed: int,
    batch: int,
    higher_is_better: bool,
) -> list[Settings]:
    """Draws of Optuna's multivariate TPE, all before any of their results is known.

    A trial that was not trained to the end is told as pruned, with its score after its last rung:
    TPE ranks it below those trained longer. A failed trial ranks last.
    """
    import optuna

    axes = {own.setting: _axis(own) for own in ranges}
    entropy = int(stream(seed, "tuned settings", batch).integers(2**32))
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about experimental arguments
            sampler = optuna.samplers.TPESampler(
                seed=entropy, n_startup_trials=0, multivariate=True, constant_liar=True
            )
            study = optuna.create_study(
                sampler=sampler, direction="maximize" if higher_is_better else "minimize"
            )
            study.add_trials(_history(ranges, tried, axes))
            asked = [study.ask(axes).params for _ in range(TPE_DRAWS * number)]
    finally:
        optuna.logging.set_verbosity(before)
    return [{own.setting: _heard(own, params[own.setting]) for own in ranges} for params in asked]


def _history(ranges: Sequence[Range], tried: Sequence[Trial], axes: Mapping[str, Any]) -> list[Any]:
    """The finished trials, as Optuna's."""
    from optuna.trial import TrialState, create_trial

    most = max(trial.last.rounds for trial in tried)
    told = []
    for trial in tried:
        params = {own.setting: _told(own, trial.settings[own.setting]) for own in ranges}
        last, own = trial.last, dict[str, Any](params=params, distributions=dict(axes))
        if last.failure is None and last.rounds == most:
            told.append(create_trial(value=last.score, **own))
        else:
            score = {0: math.nan} if last.failure else {last.rounds: last.score or 0.0}
            told.append(create_trial(state=TrialState.PRUNED, intermediate_values=score, **own))
    return told


def _axis(own: Range) -> Any:
    from optuna import distributions

    if own.choices:
        return distributions.CategoricalDistribution(list(range(len(own.choices))))
    if own.whole:
        return distributions.IntDistribution(int(own.low), int(own.high), log=own.log)
    return distributions.FloatDistribution(own.low, own.high, log=own.log)


def _told(own: Range, value: Any) -> Any:
    return own.choices.index(value) if own.choices else value


def _heard(own: Range, value: Any) -> Any:
    if own.choices:
        return own.choices[value]
    return value if own.whole else own.at(own.position(value))
