"""What the charts of scores on one page have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import altair as alt

from nufed.report.style import Styles, edge_marks, score_axis
from nufed.runs import Estimate, Run


@dataclass(frozen=True)
class Look:
    """Colours and symbols of methods, and the axis of scores.

    Where several runs are compared, ``domain`` is the range of all means and ``agents_domain`` that
    of all agents' scores, so that their charts have the same axes. Where a method diverged, they
    are the ranges of the others, and its marks are ``clipped``.
    """

    styles: Styles
    title: str
    percent: bool
    domain: tuple[float, float] | None = None
    agents_domain: tuple[float, float] | None = None
    clipped: bool = False
    higher_is_better: bool = True

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Look:
        """Of runs that are shown on one page."""
        names = [line.label for run in runs for line in run.lines() if line.kind == "method"]
        names += [name for run in runs for name in run.methods]  # charts by number of steps
        first, limits = runs[0], _limits(runs)
        better = first.measure.higher_is_better
        means = [value for run in runs for value in _means(run)]
        lost = any(not math.isfinite(row.personal.mean) for run in runs for row in run.rows())
        below = any(value < limits[0] for value in means) or (lost and better)
        above = any(value > limits[1] for value in means) or (lost and not better)
        given = len(runs) > 1 or below or above
        domain = _range(value for value in means if _within(value, limits)) if given else None
        room = 0.08 * (domain[1] - domain[0]) if domain else 0.0  # for marks at the edges
        if domain and math.isfinite(room):
            domain = domain[0] - room * below, domain[1] + room * above
        return cls(
            Styles.of(names),
            f"{first.config.eval_on} {first.measure.name}",
            first.measure.name == "accuracy",
            domain,
            _range(value for run in runs for value in _scores(run, limits)) if given else None,
            below or above,
            better,
        )

    def edges(
        self, rows: Sequence[Mapping[str, Any]], channel: Any, **encoding: Any
    ) -> Iterator[Any]:
        """Layers with a triangle at the edge of the axis for each row whose mean is beyond it, or
        not finite: that is where scores are worst."""
        if not self.clipped or self.domain is None:
            return
        across = channel is alt.X
        name, ends = "x" if across else "y", (-math.inf, math.inf)
        worst = ends[0] if self.higher_is_better else ends[1]
        shapes = ("triangle-left", "triangle-right") if across else ("triangle-down", "triangle-up")
        for edge, end, shape in zip(self.domain, ends, shapes, strict=True):
            found = []
            for row in rows:
                mean = row["mean"] if math.isfinite(row["mean"]) else worst
                if mean == end or (mean - edge) * end > 0:
                    shown = f"{mean:.4g}" if math.isfinite(mean) else "diverged"
                    found.append({**row, "mean": shown, "edge": edge})
            if found:
                place = {name: self.axis(channel, "edge")}
                yield edge_marks(found, shape, **place, **encoding)

    def axis(self, channel: Any, field: str) -> Any:
        """The axis of scores of means."""
        return score_axis(
            channel, field, self.title, self.percent, self.domain, nice=not self.clipped
        )


def interval(estimate: Estimate, percent: bool) -> tuple[float, float]:
    """The ends of a confidence interval; of a share within 0 and 1."""
    half = estimate.half_width or 0.0
    low, high = estimate.mean - half, estimate.mean + half
    return (max(low, 0.0), min(high, 1.0)) if percent else (low, high)


def _range(values: Iterator[float]) -> tuple[float, float] | None:
    found = [value for value in values if math.isfinite(value)]
    return (min(found), max(found)) if found else None


def _limits(runs: Sequence[Run]) -> tuple[float, float]:
    """Scores outside of these have diverged; an accuracy never does.

    With [a, b] the range from the untrained model to the best methods and null baselines, they are
    a − 2(b − a) and b + 2(b − a).
    """
    if runs[0].measure.name == "accuracy":
        return (-math.inf, math.inf)
    good = []
    for run in runs:
        kinds = {(row.group, row.kind): row.personal.mean for row in reversed(run.rows())}
        good += [mean for mean in kinds.values() if math.isfinite(mean)]  # the best of each
        starts = [t.metrics[0] for part in run.methods.values() for t in part.values() if t.metrics]
        good += [x for m in starts for own in m.evaluation.values() if _finite(x := own.score[0])]
    if not good:
        return (-math.inf, math.inf)
    low, high = min(good), max(good)
    reach = 2 * (high - low) or 2 * abs(high) or 1.0
    return low - reach, high + reach


def _finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


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


def _scores(run: Run, limits: tuple[float, float]) -> Iterator[float]:
    """Every agent's score that is drawn, of lines that did not diverge."""
    for line in run.lines():
        for scores in line.scores("seen"):
            own = [s.score[line.steps] for s in scores]
            if own and _within(math.fsum(own) / len(own), limits):
                yield from own
