"""Paired differences between two methods on the same agents, and what they decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from nufed.lab.runs.results import Estimate
from paper.summary import Values

Verdict: TypeAlias = Literal["held", "not held", "undecided", "not testable"]


@dataclass(frozen=True)
class Difference:
    """A mean difference with two confidence intervals.

    Over seeds: each seed's mean is one value; it generalises to other splits and runs. Over agents:
    each agent of each seed is one value; agents of a seed share a model, so that it generalises
    only to other agents of these runs. A difference should be significant in both.
    """

    over_seeds: Estimate
    over_agents: Estimate | None = None

    @classmethod
    def paired(cls, a: Values, b: Values) -> Difference:
        """a − b, scores of shape (seeds, agents) over the same seeds and agents."""
        d = a - b
        return cls(Estimate.of(d.mean(axis=1).tolist()), Estimate.of(d.ravel().tolist()))

    @property
    def mean(self) -> float:
        return self.over_seeds.mean

    @property
    def low(self) -> float:
        return self.mean - self._half_width

    @property
    def high(self) -> float:
        return self.mean + self._half_width

    @property
    def _half_width(self) -> float:
        """Of the wider interval: what it excludes, both exclude."""
        widths = [e.half_width for e in (self.over_seeds, self.over_agents) if e is not None]
        return max(w if w is not None else float("inf") for w in widths)

    def above(self, margin: float = 0.0) -> Verdict:
        """Whether it is above 0; "not held" if below ``margin``, the smallest relevant effect."""
        if self.low > 0:
            return "held"
        return "not held" if self.high < margin else "undecided"

    def small(self, margin: float) -> Verdict:
        """Whether it lies within ± margin."""
        if -margin < self.low and self.high < margin:
            return "held"
        return "not held" if self.low > margin or self.high < -margin else "undecided"


def tenths(value: float) -> str:
    """Points with one digit; the last bits of a mean don't decide how 91.05 is rounded."""
    return f"{round(100 * value, 9):.1f}"
