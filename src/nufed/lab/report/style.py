"""What all charts share: colours and symbols of methods, sizes, and the axis of scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any, TypeGuard

import altair as alt

from nufed.lab.runs import Estimate, Run
from nufed.lab.runs.json_files import or_nan

# Okabe and Ito's colour-blind-safe palette; purple instead of black, which is invisible when dark
PALETTE = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D31", "#9467BD"]
GREY = "#777777"
SHAPES = ["circle", "square", "triangle-up", "cross", "diamond", "triangle-right", "triangle-down",
          "triangle-left"]  # fmt: skip
WIDTH, HEIGHT = 660, 320
LEGEND_COLUMNS = 6  # methods in a row of a legend
DASHED = [5, 4]  # strokes of a null baseline
DOTTED = [2, 3]  # and of a global model
MAX_TICKS = 12  # up to so many steps or rounds, each has a tick
ROW = 28  # height of a method in a chart with a row for each


@dataclass(frozen=True)
class Styles:
    """The colour and symbol of every method, the same in all charts of a page.

    ``aliases`` are further names of some.
    """

    names: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Sequence[str], aliases: Mapping[str, str] | None = None) -> Styles:
        """The styles of methods in their order; a repeated name is the same method."""
        return cls(tuple(dict.fromkeys(names)), aliases or {})

    def colours(self, names: Sequence[str]) -> list[str]:
        """The colours of these methods; grey of others. They repeat after eight."""
        place = self._places()
        return [PALETTE[place[n] % len(PALETTE)] if n in place else GREY for n in names]

    def shapes(self, names: Sequence[str]) -> list[str]:
        """Their symbols, such that no two of up to 64 share both colour and symbol."""
        place = self._places()
        places = [(place.get(n, 0) + place.get(n, 0) // len(PALETTE)) for n in names]
        return [SHAPES[i % len(SHAPES)] for i in places]

    def _places(self) -> Mapping[str, int]:
        places = {name: i for i, name in enumerate(self.names)}
        return {other: places[name] for other, name in self.aliases.items()} | places


def plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A chart of these rows."""
    return alt.Chart(alt.InlineData(values=[dict(row) for row in rows]))


def fitted(chart: Any, beside: Sequence[str] = ()) -> Any:
    """The chart with its axes and legend inside its width, and room on the right for labels."""
    room = 14 + 7 * max((len(name) for name in beside), default=0)
    return chart.properties(
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        padding={"left": 5, "top": 5, "bottom": 5, "right": min(room, WIDTH // 4)},
    )


def end_labels(chart: Any, height: Any) -> Any:
    """The names of null baselines, beside the right ends of their lines."""
    text = chart.mark_text(align="left", dx=8, color=GREY, fontSize=12)
    return text.encode(y=height, text="method:N")


def spread_labels(
    ends: list[dict[str, Any]], points: list[dict[str, Any]], domain: Any = None
) -> list[dict[str, Any]]:
    """Labels at the ends of lines, moved apart to avoid overlap, within the range of the points (or
    ``domain``), so that they do not extend the axis."""
    values = [p[k] for p in points for k in ("mean", "low", "high") if math.isfinite(p.get(k, nan))]
    low, high = domain or (min(values, default=0.0), max(values, default=0.0))
    gap = 0.06 * (high - low)
    spread: list[dict[str, Any]] = []
    for end in sorted(ends, key=lambda e: float(e["mean"])):
        lowest = spread[-1]["mean"] + gap if spread else low
        spread.append({**end, "mean": max(end["mean"], lowest)})
    for place, end in enumerate(reversed(spread)):
        end["mean"] = min(end["mean"], high - place * gap)
    return spread


def edge_marks(rows: Sequence[Mapping[str, Any]], shape: str, **encoding: Any) -> Any:
    """Triangles at the edge of the axis, of values beyond it."""
    return (
        plot(rows)
        .mark_point(shape=shape, size=90, filled=True, opacity=1)
        .encode(
            tooltip=[alt.Tooltip("method:N"), alt.Tooltip("mean:N", title="beyond the axis")],
            **encoding,
        )
    )


def tooltips(names: Sequence[str], scores: Sequence[str], percent: bool) -> list[Any]:
    """What hovering shows: names and numbers, then scores."""
    titles = {"half_width": "± 95 %", "low": "lowest seed", "high": "highest seed"}
    shown = [alt.Tooltip(f"{name}:N") for name in names]
    return shown + [
        alt.Tooltip(f"{score}:Q", title=titles.get(score, score), format=number_format(percent))
        for score in scores
    ]


def number_format(percent: bool) -> str:
    """The format of scores in tooltips."""
    return ".1%" if percent else ".4~g"


def score_axis(
    channel: Any, field: str, title: str, percent: bool, domain: Any = None, nice: bool = True
) -> Any:
    """The axis of a score; ``domain`` fixes its range, so that charts can be compared."""
    scale = alt.Scale(zero=False) if domain is None else alt.Scale(domain=list(domain), nice=nice)
    axis = alt.Axis(format="%" if percent else "~g")
    return channel(f"{field}:Q", title=title, scale=scale, axis=axis)


def method_colour(names: Sequence[str], styles: Styles, *, legend: bool = True) -> Any:
    """The colour of a method, with a legend above the chart."""
    shown = alt.Legend(
        title=None, orient="top", symbolOpacity=1, symbolSize=80, columns=LEGEND_COLUMNS
    )
    scale = alt.Scale(domain=list(names), range=styles.colours(names))
    return alt.Color("method:N", scale=scale, legend=shown if legend else None)


def method_shape(names: Sequence[str], styles: Styles) -> Any:
    """The symbol of a method."""
    scale = alt.Scale(domain=list(names), range=styles.shapes(names))
    return alt.Shape("method:N", scale=scale, legend=None)


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
        """The look of runs that are shown on one page."""
        lines = [line for run in runs for line in run.lines() if line.kind == "method"]
        # in charts by number of steps, a method has the style of the first of its lines
        methods = {line.name: line.label for line in reversed(lines)}
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
            Styles.of([line.label for line in lines], methods),
            f"{first.config.eval_on} {first.measure.words}",
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
            beyond = []
            for row in rows:
                mean = row["mean"] if math.isfinite(row["mean"]) else worst
                if mean == end or (mean - edge) * end > 0:
                    shown = f"{mean:.4g}" if math.isfinite(mean) else "diverged"
                    beyond.append({**row, "mean": shown, "edge": edge})
            if beyond:
                place = {name: self.axis(channel, "edge")}
                yield edge_marks(beyond, shape, **place, **encoding)

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
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else None


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
        good += [
            x for m in starts for curves in m.evaluation.values() if _finite(x := curves.score[0])
        ]
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
                        yield from map(or_nan, curves.score)
                        yield or_nan(curves.global_score)
            seen = [s.score for s in trained.final if s.seen]
            yield from (math.fsum(after) / len(seen) for after in zip(*seen, strict=True))


def _scores(run: Run, limits: tuple[float, float]) -> Iterator[float]:
    """Every agent's score that is drawn, of lines that did not diverge."""
    for line in run.lines():
        for scores in line.scores("seen"):
            values = [s.score[line.steps] for s in scores]
            if values and _within(math.fsum(values) / len(values), limits):
                yield from values
