"""The chart of the results table: each method's personal models and its global model."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from nufed.report.look import Look, interval
from nufed.report.style import ROW, WIDTH, fitted, method_shape, plot, tooltips
from nufed.runs import Run


def result_chart(run: Run, group: str, look: Look | None = None) -> Any:
    """A row for each method and null baseline, in the order of the table."""
    look = look or Look.of([run])
    every = [row for row in run.rows() if row.group == group]
    rows = [row for row in every if math.isfinite(row.personal.mean)]
    names = [row.name for row in every]
    personal = [
        {
            "method": row.name,
            "mean": row.personal.mean,
            "half_width": row.personal.half_width,
            **dict(zip(("low", "high"), interval(row.personal, look.percent), strict=True)),
            "model": "personal",
        }
        for row in rows
    ]
    shared = [
        {"method": row.name, "mean": row.shared.mean, "model": "global"}
        for row in rows
        if row.kind == "method" and math.isfinite(row.shared.mean)
    ]

    def across(field: str) -> Any:
        return look.axis(alt.X, field)

    clip = {"clip": True} if look.clipped else {}
    scale = alt.Scale(domain=names, range=look.styles.colours(names))
    y = alt.Y("method:N", sort=names, title=None, axis=alt.Axis(grid=True))
    style = {"y": y, "color": alt.Color("method:N", scale=scale, legend=None)}
    symbol = {"shape": method_shape(names, look.styles)}
    bars = [row for row in personal if row["half_width"] is not None]
    chart = alt.layer(
        plot(bars)
        .mark_rule(strokeWidth=3, opacity=0.4, **clip)
        .encode(x=across("low"), x2="high:Q", **style),
        plot(shared)
        .mark_point(size=70, strokeWidth=1.5, filled=False, **clip)
        .encode(
            x=across("mean"),
            tooltip=tooltips(["method", "model"], ["mean"], look.percent),
            **style,
            **symbol,
        ),
        plot(personal)
        .mark_point(size=90, filled=True, opacity=1, **clip)
        .encode(
            x=across("mean"),
            tooltip=tooltips(["method", "model"], ["mean", "half_width"], look.percent),
            **style,
            **symbol,
        ),
        *look.edges([{"method": r.name, "mean": r.personal.mean} for r in every], alt.X, **style),
    ).properties(width=WIDTH, height=ROW * len(names))
    return fitted(chart)
