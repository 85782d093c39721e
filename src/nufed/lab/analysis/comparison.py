"""Comparisons: the best methods of a run, what ν > 1 gains in it, methods of several runs, and
scores by the value of a configuration key in which runs differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np

from nufed.algorithms.gmeta import GMeta
from nufed.lab.config.sweep_grid import value_text
from nufed.lab.runs import Row, Run
from nufed.lab.runs.results import MIN_VALUES, Estimate, Line, Paired, Trained, over_agents, paired
from nufed.lab.runs.sweep_record import Sweep

SMALL = 0.2  # of the standard deviation over agents: differences within are practically equal


@dataclass(frozen=True)
class Finding:
    """The best method of a run on a group of agents, and the strongest null baseline.

    A method is the best only if it beats each of the others beyond noise.

    Args:
        methods: those with finite scores, the best first.
        ties: those that can't be told apart from the best, or are practically equal.
        equal: whether all of ``ties`` are practically equal to the best.
        null: the strongest null baseline, if the run has any.
        over_null: the paired differences to it, by method.
        behind: the paired difference of the second method to the best.
    """

    methods: list[Row]
    ties: list[Row]
    equal: bool
    null: Row | None
    over_null: dict[str, Paired]
    behind: Paired | None

    @property
    def best(self) -> Row:
        return self.methods[0]

    @property
    def none_beats_null(self) -> bool:
        """Whether no method, the best among them, is better than the null baseline beyond noise."""
        verdicts = [pair.verdict for pair in self.over_null.values()]
        return self.best.name in self.over_null and "better" not in verdicts


def find_best(run: Run, group: str) -> Finding | None:
    """The finding on a group of agents; None if no method has finite scores."""
    rows = [r for r in run.rows() if r.group == group and math.isfinite(r.personal.mean)]
    methods = [row for row in rows if row.kind == "method"]
    if not methods:
        return None
    pairs = {(p.name, p.against): p for p in run.paired() if p.group == group}
    behind = [pairs.get((row.name, methods[0].name)) for row in methods[1:]]
    equal = [pair is not None and practically_equal(run, pair) for pair in behind]
    tied = [
        pair is None or pair.verdict != "worse" or same
        for pair, same in zip(behind, equal, strict=True)
    ]
    null = next((row for row in rows if row.kind == "baseline"), None)
    over = {r.name: p for r in methods if null and (p := pairs.get((r.name, null.name)))}
    return Finding(
        methods,
        [row for row, is_tied in zip(methods[1:], tied, strict=True) if is_tied],
        all(same for same, is_tied in zip(equal, tied, strict=True) if is_tied),
        null,
        over,
        behind[0] if behind else None,
    )


def practically_equal(run: Run, pair: Paired) -> bool:
    """Whether a paired difference and its interval are small beside the spread of agents' scores:
    within a fifth of their standard deviation."""
    spread = [r.std for r in run.rows() if (r.name, r.group) == (pair.name, pair.group)]
    return pair.half_width is not None and abs(pair.mean) + pair.half_width <= SMALL * spread[0]


Incomparable: TypeAlias = Literal["data", "at_sites", "splits", "seeds"]


@dataclass(frozen=True)
class Comparison:
    """Paired differences of a run's methods to those of another, or why there are none.

    Each pair has the names of both methods.
    """

    run: Run
    pairs: list[Paired]
    incomparable: Incomparable | None = None


def compare(runs: Sequence[Run], group: str) -> list[Comparison]:
    """Each further run compared with the first, on a group of agents.

    Methods of the same name are compared; if no name is in both runs, their best ones. Seeds whose
    splits differ are left out.
    """
    comparisons = []
    for other in runs[1:]:
        seeds = _same_splits(runs[0], other)
        if isinstance(seeds, str):
            comparisons.append(Comparison(other, [], seeds))
            continue
        theirs, ours = (_best_first(run, group, seeds) for run in (other, runs[0]))
        names = [(name, name) for name in theirs if name in ours]
        names = names or [(a, b) for a, b in zip(theirs, ours, strict=False)][:1]
        sign = 1 if runs[0].measure.higher_is_better else -1
        pairs = [paired(group, (a, b), (theirs[a], ours[b]), sign) for a, b in names]
        comparisons.append(Comparison(other, [pair for pair in pairs if pair is not None]))
    return comparisons


def _same_splits(one: Run, other: Run) -> list[int] | Incomparable:
    """The seeds in which two runs have the same agents and samples; if there are none, why."""
    if one.data_sha256 != other.data_sha256:
        return "data"
    if one.federated or other.federated:
        return "at_sites"
    common = [seed for seed in one.splits if seed in other.splits]
    same = [seed for seed in common if one.splits[seed].sha256 == other.splits[seed].sha256]
    return same or ("splits" if common else "seeds")


def _best_first(run: Run, group: str, seeds: Sequence[int]) -> dict[str, Line]:
    """The lines of the methods of a run with these seeds only, the best first."""
    lines = {line.label: line for line in run.lines()}
    names = [row.name for row in run.rows() if (row.kind, row.group) == ("method", group)]
    kept = {name: {s: t for s, t in lines[name].seeds.items() if s in seeds} for name in names}
    return {name: replace(lines[name], seeds=trained) for name, trained in kept.items()}


IGNORED = (  # keys that do not change results
    "measured_curvature",
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


@dataclass(frozen=True)
class Gain:
    """Scores of ``many`` minus those of ``one``, over seeds.

    Args:
        many, one: the methods, of the largest ν and of ν = 1.
        group: of agents.
        rounds: of both, for ``per_round``.
        per_round: the difference after the same rounds.
        work: how many times as much a round of ``many`` computes; a product counts as two.
        equal_round: the round of ``many`` at which it had computed as much as ``one`` at its end.
        per_gradient: the difference at these gradients.
    """

    many: str
    one: str
    group: str
    rounds: int
    per_round: Estimate
    work: float
    equal_round: int
    per_gradient: Estimate


def gain_of_steps(run: Run) -> Gain | None:
    """What the method of the largest ν gains over that of ν = 1, and at which cost.

    Their scores are compared after equally many rounds, and after equally many gradients. None
    where no two methods differ in ν alone, or no round can be compared.
    """
    meta = {n: a for n, a in run.config.algorithms().items() if isinstance(a, GMeta)}
    steps = {n: a.adapt_steps for n, a in meta.items() if n in run.methods and a.adapt_steps}
    many = max(steps, key=lambda name: steps[name], default="")
    one = next((name for name, nu in steps.items() if nu == 1), "")
    if (
        not many
        or not one
        or steps[many] < 2
        or run.config.steps_of(many) != run.config.steps_of(one)
    ):
        return None
    group, shown = run.groups[-1], run.config.steps_of(many)[0]
    ends = [min(t.metrics[-1].round for t in run.methods[name].values()) for name in (many, one)]
    done, whole = (_work(next(iter(run.methods[name].values()))) for name in (many, one))
    scores = {
        name: {
            seed: {
                m.round: score
                for m in t.metrics
                if group in m.evaluation
                and (score := m.evaluation[group].score[shown]) is not None  # it diverged
            }
            for seed, t in run.methods[name].items()
        }
        for name in (many, one)
    }
    seeds = sorted(scores[many].keys() & scores[one].keys())
    if not seeds:
        return None
    both = set.intersection(*(set(scores[n][s]) for n in (many, one) for s in seeds))
    rounds = max((k for k in both if k <= min(ends)), default=0)
    of_many = set.intersection(*(set(scores[many][s]) for s in seeds))
    fair = max((k for k in of_many if done[k] <= whole[ends[1]]), default=0)
    if not rounds or not fair or any(ends[1] not in scores[one][s] for s in seeds):
        return None

    def differences(at_many: int, at_one: int) -> Estimate:
        return Estimate.of([scores[many][s][at_many] - scores[one][s][at_one] for s in seeds])

    return Gain(
        many,
        one,
        group,
        rounds,
        differences(rounds, rounds),
        done[rounds] / whole[rounds],
        fair,
        differences(fair, ends[1]),
    )


def _work(trained: Trained) -> list[int]:
    """The gradients computed up to every round."""
    return list(accumulate(m.gradients + 2 * m.hvps if m.round else 0 for m in trained.metrics))
