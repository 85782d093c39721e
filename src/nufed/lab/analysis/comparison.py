"""Which methods of a run are best, and how runs differ, by paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from nufed.lab.runs import Row, Run
from nufed.lab.runs.results import Line, Paired, paired

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
