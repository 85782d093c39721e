"""Paired differences between methods, which in one run have the same agents, splits and batches.

What makes an agent easy or hard is the same for all methods, so that it cancels in the difference
of their scores on that agent: its interval is often much narrower than those of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from nufed.evaluate import Measure
from nufed.runs.results import (
    MIN_VALUES,
    Estimate,
    Line,
    Row,
    deviations,
    over_agents,
    over_samples,
)

Scores: TypeAlias = Mapping[int, Mapping[int, float]]  # by seed and agent


@dataclass(frozen=True)
class Paired:
    """The mean of (score of ``name`` − score of ``against``) over the same agents and seeds.

    ``half_width`` is that of its 95 % confidence interval, and ``over`` what that is over: with
    three seeds or more over their means, unless that over agents is wider (a few seeds can agree
    by chance), else over agents (an agent's value is its mean over seeds). Both are None with
    fewer than three seeds and agents. ``verdict`` is "better" or "worse" if the interval excludes
    0, else "undecided". Each interval is for one comparison, not corrected for their number.
    ``over_samples`` is the half-width of the interval over the samples of these very agents, by a
    paired bootstrap, where they are few (:func:`nufed.runs.results.over_samples`).
    """

    group: str
    name: str
    against: str
    mean: float
    half_width: float | None
    over: Literal["seeds", "agents"] | None
    verdict: Literal["better", "worse", "undecided"]
    over_samples: float | None = None

    @classmethod
    def of(
        cls, group: str, names: tuple[str, str], scores: tuple[Scores, Scores], sign: int
    ) -> Paired | None:
        """The first minus the second; None if they have no agent in common.

        Args:
            group: of agents.
            names: of both.
            scores: of both, by seed and agent; only agents with both scores are compared.
            sign: 1 if higher scores are better, else −1.
        """
        one, other = scores
        common = [seed for seed in one if seed in other]
        pairs = [
            {
                agent: one[seed][agent] - other[seed][agent]
                for agent in one[seed].keys() & other[seed]
            }
            for seed in common
        ]
        seeds = [pair for pair in pairs if pair]
        if not seeds:
            return None
        found = Estimate.of([float(np.mean(list(pair.values()))) for pair in seeds])
        half = over_agents(seeds)
        over: Literal["seeds", "agents"] = "agents"
        if len(seeds) >= MIN_VALUES and (half is None or not (found.half_width or 0.0) < half):
            half, over = found.half_width, "seeds"
        low, high = sorted(sign * (found.mean + side * (half or 0.0)) for side in (-1, 1))
        decided = half is not None
        return cls(
            group,
            *names,
            found.mean,
            half,
            over if decided else None,
            "better" if decided and low > 0 else "worse" if decided and high < 0 else "undecided",
        )


def paired_differences(
    lines: Sequence[Line], rows: Sequence[Row], measure: Measure
) -> list[Paired]:
    """Each method minus each null baseline, and minus the best method, by group.

    Args:
        lines: methods and null baselines, with the scores of their agents.
        rows: their results; the first method of a group is its best.
        measure: of the scores.
    """
    by_label = {line.label: line for line in lines}
    sign = 1 if measure.higher_is_better else -1
    found = []
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == group]
        lines_of = {row.name: by_label[row.name] for row in own}
        methods = [row.name for row in own if row.kind == "method"]
        nulls = [row.name for row in own if row.kind == "baseline"]
        for name in methods:
            for against in [*nulls, *methods[:1]]:
                both = (lines_of[name], lines_of[against])
                if name != against and (pair := paired(group, (name, against), both, sign)):
                    found.append(pair)
    return found


def paired(
    group: str, names: tuple[str, str], lines: tuple[Line, Line], sign: int
) -> Paired | None:
    """The first line minus the second, on the agents of a group; arguments as of Paired.of."""
    one, other = (_scores(line, group) for line in lines)
    found = Paired.of(group, names, (one, other), sign)
    if found is None:
        return None
    first, second = (
        {
            s: deviations(own, line.steps)
            for s, own in zip(line.seeds, line.scores(group), strict=True)
        }
        for line in lines
    )
    with np.errstate(all="ignore"):
        pairs = [
            {
                agent: own[agent] - second[seed][agent]
                for agent in own.keys() & second[seed]
                if len(own[agent]) == len(second[seed][agent])
            }
            for seed, own in first.items()
            if seed in second
        ]
    return replace(found, over_samples=over_samples(pairs))


def _scores(line: Line, group: str) -> Scores:
    """The personal models' scores by seed and agent, as results show them; diverged ones NaN."""
    own = zip(line.seeds, line.scores(group), strict=True)
    return {
        seed: {
            s.agent: value if math.isfinite(value := s.score[line.steps]) else math.nan
            for s in scores
        }
        for seed, scores in own
    }
