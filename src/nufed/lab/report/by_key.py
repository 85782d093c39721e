"""Charts of scores by one configuration key, or by two, of several runs.

The configuration key by which runs differ, if it is one, and their scores by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import altair as alt

from nufed.lab.report.style import (
    DASHED,
    GREY,
    HEIGHT,
    WIDTH,
    Styles,
    end_labels,
    fitted,
    method_colour,
    method_shape,
    number_format,
    plot,
    score_axis,
    spread_labels,
)
from nufed.lab.runs import Run

IGNORED = (
    "name",
    "note",
    "workers",
    "threads",
    "engine",
    "checkpoint_every",
    "save_every",
    "eval_every",
)


def one_differing_key(runs: Sequence[Run]) -> str:
    """The only key whose values differ between runs; empty if none or several do.

    Keys that don't change results are ignored. A setting that several methods have, with one value
    in each run, counts as one key.
    """
    flat = [dict(_flat(run.config.model_dump())) for run in runs]
    keys = {key for own in flat for key in own if key.split(".")[0] not in IGNORED}
    differing = {key for key in keys if len({repr(own.get(key)) for own in flat}) > 1}
    shared = {key for key in differing if key.startswith(("method.", "methods."))}
    settings = {key.rpartition(".")[2] for key in shared}
    if len(shared) > 1 and shared == differing and len(settings) == 1:
        single = [len({repr(own[key]) for key in shared if key in own}) == 1 for own in flat]
        return f"method.{settings.pop()}" if all(single) else ""
    return differing.pop() if len(differing) == 1 else ""


def keyed_scores(runs: Sequence[Run], key: str, group: str) -> list[KeyedScore]:
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


def value_of(run: Run, key: str) -> KeyValue:
    """The value of a key in a run's configuration; what is not a number is shown as text."""
    flat = dict(_flat(run.config.model_dump()))
    settings = (flat[k] for k in flat if k.endswith("." + key.rpartition(".")[2]))
    value = flat[key] if key in flat else next(settings, None)
    return value if isinstance(value, bool | int | float | str) else str(value)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of nested tables, joined by dots."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


KeyValue: TypeAlias = str | int | float | bool
LOG_RATIO = 20  # positive numbers that span more than this are drawn on a logarithmic axis


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


def score_by_key(
    scores: Sequence[KeyedScore],
    key: str,
    *,
    title: str = "score",
    percent: bool = False,
    styles: Styles | None = None,
) -> Any:
    """Each method's score over the values of ``key``; bars: 95 % confidence intervals.

    Numbers are placed to scale, logarithmically where they are positive and span a factor of more
    than 20; other values in the order of the scores, without lines. Non-finite scores are left out.

    Args:
        scores: of every method and value of the key.
        key: as in a configuration, such as ``data.dirichlet``.
        title: of the score's axis.
        percent: whether scores are shares, shown in percent.
        styles: colours and symbols; by default in the order of the methods.
    """
    rows = [_row(score, key) for score in scores if math.isfinite(score.mean)]
    names = _methods(scores)
    styles = styles or Styles.of(names)
    values = [score.keys[key] for score in scores]
    axis, numeric = _key_axis(key, values), all(map(_is_number, values))
    order = {place: n for n, place in enumerate(_ordered(values))}
    shown = number_format(percent)
    hover = [
        alt.Tooltip("method:N"),
        alt.Tooltip(f"{_FIELD}:N", title=key),
        alt.Tooltip("mean:Q", format=shown),
        alt.Tooltip("half_width:Q", title="± 95 %", format=shown),
    ]

    def base(chosen: list[dict[str, Any]]) -> Any:
        return plot(chosen).encode(x=axis)

    def height(field: str) -> Any:
        return score_axis(alt.Y, field, title, percent)

    def line(chosen: list[dict[str, Any]], **style: Any) -> Any:
        return base(chosen if numeric else []).mark_line(**style)

    if percent:
        for row in rows:
            row["low"], row["high"] = max(row["low"], 0.0), min(row["high"], 1.0)
    own = [row for row in rows if not row["baseline"]]
    nulls = [row for row in rows if row["baseline"]]
    bars = [row for row in own if row["half_width"] is not None]
    colour = method_colour(names, styles)
    ends = {row["method"]: row for row in sorted(nulls, key=lambda row: order[row[_FIELD]])}
    chart = alt.layer(
        line(nulls, strokeDash=DASHED, color=GREY).encode(y=height("mean"), detail="method:N"),
        base(nulls).mark_point(size=30, color=GREY).encode(y=height("mean"), tooltip=hover),
        end_labels(base(spread_labels(list(ends.values()), rows)), height("mean")),
        base(bars)
        .mark_rule(opacity=0.45, strokeWidth=1.5)
        .encode(y=height("low"), y2="high:Q", color=colour),
        line(own, strokeWidth=2).encode(y=height("mean"), color=colour),
        base(own)
        .mark_point(size=60, strokeWidth=1.5)
        .encode(y=height("mean"), color=colour, shape=method_shape(names, styles), tooltip=hover),
    ).properties(width=WIDTH, height=HEIGHT)
    return fitted(chart, list(ends))


def score_by_two_keys(
    scores: Sequence[KeyedScore],
    across: str,
    down: str,
    *,
    title: str = "score",
    percent: bool = False,
) -> Any:
    """A heat map of one method's score over two keys, with the score written into each cell.

    Args:
        scores: of one method; a cell with several (they differ by a third key) shows their mean.
        across, down: the keys.
        title: of the score; percent: whether it is a share, shown in percent.
    """
    cells: dict[tuple[str, str], list[float]] = {}
    for score in scores:
        if math.isfinite(score.mean):
            cell = (_text(score.keys[across]), _text(score.keys[down]))
            cells.setdefault(cell, []).append(score.mean)
    found = [math.fsum(means) / len(means) for means in cells.values()]
    rows = [
        {_FIELD: x, "other": y, "mean": mean} for (x, y), mean in zip(cells, found, strict=True)
    ]
    shown = number_format(percent)
    columns, lines = (_order([score.keys[key] for score in scores]) for key in (across, down))
    middle = (min(found) + max(found)) / 2 if found else 0.0
    base = plot(rows).encode(
        x=alt.X(f"{_FIELD}:N", sort=columns, title=across, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("other:N", sort=lines, title=down),
        tooltip=[
            alt.Tooltip(f"{_FIELD}:N", title=across),
            alt.Tooltip("other:N", title=down),
            alt.Tooltip("mean:Q", title=title, format=shown),
        ],
    )
    # one colour map for both themes, light to dark, so that the text's colour can depend on it
    scale = alt.Scale(range=["#deebf7", "#08519c"], interpolate="rgb")
    legend = alt.Legend(format="%" if percent else "~g")
    ink = alt.condition(alt.datum.mean > middle, alt.value("#ffffff"), alt.value("#10202f"))
    return alt.layer(
        base.mark_rect().encode(color=alt.Color("mean:Q", title=title, scale=scale, legend=legend)),
        base.mark_text(fontSize=12).encode(text=alt.Text("mean:Q", format=shown), color=ink),
    ).properties(width=max(120, min(WIDTH, 90 * len(columns))), height=max(120, 40 * len(lines)))


_FIELD = "value"  # of a key: its name has dots, which Vega takes for nested fields


def _methods(scores: Sequence[KeyedScore], *, baseline: bool = False) -> list[str]:
    return list(dict.fromkeys(s.method for s in scores if s.baseline == baseline))


def _row(score: KeyedScore, key: str) -> dict[str, Any]:
    value, half = score.keys[key], score.half_width
    half = half if half is not None and math.isfinite(half) else None
    return {
        "method": score.method,
        _FIELD: value if _is_number(value) else _text(value),
        "mean": score.mean,
        "half_width": half,
        "low": score.mean - (half or 0.0),
        "high": score.mean + (half or 0.0),
        "baseline": score.baseline,
    }


def _key_axis(key: str, values: Sequence[KeyValue]) -> Any:
    """A numeric axis with a tick at each value, or an ordinal one."""
    numbers = [v for v in values if isinstance(v, int | float) and _is_number(v)]
    if len(numbers) < len(values):
        axis = alt.Axis(labelAngle=0)
        return alt.X(f"{_FIELD}:N", title=key, sort=_order(values), axis=axis)
    positive = min(numbers, default=0) > 0
    log = positive and max(numbers) > LOG_RATIO * min(numbers)
    scale = alt.Scale(type="log" if log else "linear", zero=False, nice=False, padding=20)
    ticks = alt.Axis(values=sorted(set(numbers)), format="~g", labelOverlap=True)
    return alt.X(f"{_FIELD}:Q", title=key, scale=scale, axis=ticks)


def _is_number(value: KeyValue) -> bool:
    return not isinstance(value, bool | str) and math.isfinite(value)


def _order(values: Sequence[KeyValue]) -> list[str]:
    """Every value once, as text."""
    return list(dict.fromkeys(map(_text, _ordered(values))))


def _ordered(values: Sequence[KeyValue]) -> list[KeyValue]:
    """Numbers by size, if all are; else the values in their order, as a chart's rows have them."""
    if all(map(_is_number, values)):
        return sorted(values, key=float)
    return [value if _is_number(value) else _text(value) for value in values]


def _text(value: KeyValue) -> str:
    if isinstance(value, bool):
        return str(value).lower()  # as in TOML
    return value if isinstance(value, str) else f"{value:g}"
