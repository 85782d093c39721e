"""What all charts share: colours and symbols of methods, sizes, axes and the two themes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import altair as alt

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


def _theme(ink: str, faint: str, grid: str, ramp: Sequence[str]) -> dict[str, Any]:
    """A Vega-Lite configuration; the background is that of the page."""
    text = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12}
    return {
        "header": text,
        "axis": {
            **text,
            "labelLimit": 260,
            "gridColor": grid,
            "domainColor": faint,
            "tickColor": faint,
        },
        "legend": {**text, "labelLimit": 0, "orient": "top"},
        "title": {"color": ink},
        "view": {"stroke": grid},
        "range": {"ramp": list(ramp), "heatmap": list(ramp)},
    }


LIGHT = _theme("#1b1b1b", "#888888", "#e2e2e2", ["#ffffff", "#08519c"])
DARK = _theme("#e6e6e6", "#888888", "#3a3d42", ["#1f2329", "#7db8f0"])


@dataclass(frozen=True)
class Styles:
    """The colour and symbol of every method, the same in all charts of a page."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Styles:
        """Of methods in their order; a name that occurs again is the same method."""
        return cls(tuple(dict.fromkeys(names)))

    def colours(self, names: Sequence[str]) -> list[str]:
        """The colours of these methods; grey of others. They repeat after eight."""
        place = self._places()
        return [PALETTE[place[n] % len(PALETTE)] if n in place else GREY for n in names]

    def shapes(self, names: Sequence[str]) -> list[str]:
        """Their symbols, such that no two of up to 64 share both colour and symbol."""
        place = self._places()
        found = [(place.get(n, 0) + place.get(n, 0) // len(PALETTE)) for n in names]
        return [SHAPES[i % len(SHAPES)] for i in found]

    def _places(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.names)}


def colours(names: Sequence[str]) -> list[str]:
    """A colour for each name, in their order; repeated after eight."""
    return Styles.of(names).colours(names)


def shapes(names: Sequence[str]) -> list[str]:
    """A symbol for each name, in their order."""
    return Styles.of(names).shapes(names)


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
    """Of scores in tooltips."""
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
