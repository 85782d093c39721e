"""The chart of ``nufed advise``: accuracy by number of fine-tuning steps, with its spread."""

from __future__ import annotations

from typing import Any

import altair as alt

from nufed.lab.analysis.advise import Advice, Curve
from nufed.lab.report.style import GREY, HEIGHT, PALETTE, WIDTH


def advice_chart(advice: Advice) -> Any:
    """Each method's score by number of steps, with its α; the recommendation with its spread."""
    best = advice.recommended_curve
    accuracy = advice.accuracy
    sign = 1 if accuracy else -1
    names = list(advice.auto)
    colour = alt.Color(
        "method:N",
        scale=alt.Scale(domain=names, range=PALETTE[: len(names)]),
        legend=alt.Legend(title=None, orient="top", symbolOpacity=1, symbolSize=80),
    )

    def rows(curve: Curve) -> list[dict[str, Any]]:
        return [
            {
                "method": curve.method,
                "steps": point.steps,
                **{key: sign * getattr(point, key) for key in ("mean", "low", "high")},
            }
            for point in curve.points
        ]

    def chart(values: list[dict[str, Any]]) -> Any:
        return alt.Chart(alt.InlineData(values=values)).encode(
            x=alt.X("steps:Q", title="fine-tuning steps", axis=alt.Axis(tickMinStep=1, format="d"))
        )

    def height(field: str) -> Any:
        title = "accuracy on held-out samples" if accuracy else "loss on held-out samples"
        axis = alt.Axis(format="%" if accuracy else "~g")
        return alt.Y(f"{field}:Q", title=title, scale=alt.Scale(zero=False), axis=axis)

    lines = [row for curve in advice.curves if curve.times == 1 for row in rows(curve)]
    chosen = [row for row in rows(best) if row["steps"] == advice.recommended.steps]
    layers = [
        chart(rows(best))
        .mark_area(opacity=0.15)
        .encode(y=height("low"), y2="high:Q", color=colour),
        chart(lines).mark_line(strokeWidth=2).encode(y=height("mean"), color=colour),
        chart(lines)
        .mark_point(size=45, strokeWidth=1.5)
        .encode(y=height("mean"), color=colour, shape=alt.Shape("method:N", legend=None)),
        chart(chosen)
        .mark_point(size=260, strokeWidth=2.5, color="#000000")
        .encode(y=height("mean")),
    ]
    if advice.majority is not None:
        last = lines[-1]["steps"]
        null = [{"steps": step, "mean": advice.majority, "name": "majority"} for step in (0, last)]
        dashed = chart(null).mark_line(strokeDash=[5, 4], color=GREY).encode(y=height("mean"))
        text = chart(null[1:]).mark_text(align="left", dx=8, color=GREY, fontSize=11)
        layers += [dashed, text.encode(y=height("mean"), text="name:N")]
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
