"""Scores by the value of a configuration key: of runs that differ by it, and of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from nufed.lab.config.sweep_grid import value_text
from nufed.lab.runs import Run
from nufed.lab.runs.results import MIN_VALUES, Estimate, Line, over_agents
from nufed.lab.runs.sweep_record import Sweep

IGNORED = (  # keys that do not change results
    "name",
    "note",
    "workers",
    "threads",
    "engine",
    "checkpoint_every",
    "save_every",
    "eval_every",
)
KeyValue: TypeAlias = str | int | float | bool


@dataclass(frozen=True)
class KeyedScore:
    """The score of a method in one run, with the values of the keys that differ between runs.

    ``half_width`` is that of the 95 % confidence interval (None: not known). A ``baseline`` is
    drawn in grey.
    """

    keys: Mapping[str, KeyValue]
    method: str
    mean: float
    half_width: float | None = None
    baseline: bool = False


def one_differing_key(runs: Sequence[Run]) -> str:
    """The only key whose values differ between runs; empty if none or several do.

    Keys that don't change results are ignored. A setting that several methods have, with one value
    in each run, counts as one key.
    """
    flat = [dict(_leaves(run.config.model_dump())) for run in runs]
    keys = {key for run in flat for key in run if key.split(".")[0] not in IGNORED}
    differing = {key for key in keys if len({repr(run.get(key)) for run in flat}) > 1}
    shared = {key for key in differing if key.startswith(("method.", "methods."))}
    names = {key.rpartition(".")[2] for key in shared}
    if len(shared) > 1 and shared == differing and len(names) == 1:
        single = [len({repr(run[key]) for key in shared if key in run}) == 1 for run in flat]
        return f"method.{names.pop()}" if all(single) else ""
    return differing.pop() if len(differing) == 1 else ""


def value_of(run: Run, key: str) -> KeyValue:
    """The value of a key in a run's configuration; what is not a number is shown as text."""
    flat = dict(_leaves(run.config.model_dump()))
    settings = (flat[k] for k in flat if k.endswith("." + key.rpartition(".")[2]))
    value = flat[key] if key in flat else next(settings, None)
    return value if isinstance(value, bool | int | float | str) else str(value)


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of nested tables, joined by dots."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def scores_of_runs(runs: Sequence[Run], key: str, group: str) -> list[KeyedScore]:
    """The scores of every method and null baseline, with the value of the key in its run."""
    return [
        KeyedScore(
            {key: value_of(run, key)},
            row.name,
            row.personal.mean,
            row.personal.half_width,
            row.kind == "baseline",
        )
        for run in runs
        for row in run.rows()
        if row.group == group
    ]


def keyed_scores(sweep: Sweep, group: str) -> list[KeyedScore]:
    """The score of every method and null baseline in every run, with the values of its keys."""
    return [
        KeyedScore(
            {key: _value(value) for key, value in sweep.values[name].items()},
            row.name,
            row.personal.mean,
            row.personal.half_width,
            row.kind == "baseline",
        )
        for name, run in sweep.runs.items()
        for row in run.rows()
        if row.group == group
    ]


def marginal_scores(sweep: Sweep, group: str, key: str) -> list[KeyedScore]:
    """Scores by the values of one key, averaged over those of the others.

    The interval is that over seeds, each averaged over the same runs; with fewer than three seeds
    over agents.
    """
    if len(sweep.runs) == len(sweep.keys[key]):
        return keyed_scores(sweep, group)
    by_place: dict[tuple[str, KeyValue, bool], list[dict[int, dict[int, float]]]] = {}
    for name, run in sweep.runs.items():
        for line in run.lines():
            each = _by_seed_and_agent(line, group)
            if each:
                place = (line.label, _value(sweep.values[name][key]), line.kind == "baseline")
                by_place.setdefault(place, []).append(each)
    scores = []
    for (method, value, baseline), runs in by_place.items():
        common = sorted(set.intersection(*(set(each) for each in runs)))
        if not common:
            continue
        by_seed = [
            float(np.mean([np.mean(list(each[seed].values())) for each in runs])) for seed in common
        ]
        mean = Estimate.of(by_seed)
        half = mean.half_width
        if len(by_seed) < MIN_VALUES:
            half = over_agents([each[seed] for each in runs for seed in common])
        scores.append(KeyedScore({key: value}, method, mean.mean, half, baseline))
    return scores


def _by_seed_and_agent(line: Line, group: str) -> dict[int, dict[int, float]]:
    return {
        seed: {s.agent: s.score[line.steps] for s in scores}
        for seed, scores in zip(line.seeds, line.scores(group), strict=True)
        if scores
    }


def _value(value: Any) -> KeyValue:
    return value if isinstance(value, str | int | float | bool) else value_text(value)
