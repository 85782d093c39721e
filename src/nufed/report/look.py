"""What the charts of scores on one page have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nufed.report.style import Styles
from nufed.runs import Estimate, Run


@dataclass(frozen=True)
class Look:
    """Colours and symbols of methods, and the axis of scores.

    Where several runs are compared, ``domain`` is the range of all means and ``agents_domain`` that
    of all agents' scores, so that their charts have the same axes.
    """

    styles: Styles
    title: str
    percent: bool
    domain: tuple[float, float] | None = None
    agents_domain: tuple[float, float] | None = None

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Look:
        """Of runs that are shown on one page."""
        names = [line.label for run in runs for line in run.lines() if line.kind == "method"]
        names += [name for run in runs for name in run.methods]  # charts by number of steps
        first, several = runs[0], len(runs) > 1
        return cls(
            Styles.of(names),
            f"{first.config.eval_on} {first.measure.name}",
            first.measure.name == "accuracy",
            _range(value for run in runs for value in _means(run)) if several else None,
            _range(value for run in runs for value in _scores(run)) if several else None,
        )


def interval(estimate: Estimate, percent: bool) -> tuple[float, float]:
    """The ends of a confidence interval; of a share within 0 and 1."""
    half = estimate.half_width or 0.0
    low, high = estimate.mean - half, estimate.mean + half
    return (max(low, 0.0), min(high, 1.0)) if percent else (low, high)


def _range(values: Iterator[float]) -> tuple[float, float] | None:
    found = [value for value in values if math.isfinite(value)]
    return (min(found), max(found)) if found else None


def _means(run: Run) -> Iterator[float]:
    """All means that are drawn: by round, by number of steps, and the results' intervals."""
    for row in run.rows():
        yield from (row.shared.mean, *interval(row.personal, run.measure.name == "accuracy"))
    for line in run.lines():
        for trained in line.seeds.values():
            for each in trained.metrics:
                for evaluated in (each.evaluation, each.evaluation_chosen):
                    for curves in evaluated.values():
                        yield from (math.nan if v is None else v for v in curves.score)
                        yield math.nan if curves.global_score is None else curves.global_score
            seen = [s.score for s in trained.final if s.seen]
            yield from (math.fsum(after) / len(seen) for after in zip(*seen, strict=True))


def _scores(run: Run) -> Iterator[float]:
    """Every agent's score that is drawn."""
    for line in run.lines():
        for scores in line.scores("seen"):
            yield from (s.score[line.steps] for s in scores)
