"""The charts of ``nufed bounds``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import altair as alt

from nufed.lab.report.bounds_tables import TERMS
from nufed.lab.report.style import HEIGHT, WIDTH, colours, fitted, plot
from nufed.lab.runs.bounds_record import BoundsRecord


def bounds_charts(bounds: BoundsRecord) -> Iterator[tuple[str, str, Any]]:
    """Theorem 1's terms per method, and the measured stationarity by round."""
    order = list(TERMS.values())
    terms = [
        {"method": row.method, "term": TERMS[term], "value": value}
        for row in bounds.methods
        if row.promised
        for term, value in row.promised.terms
        if math.isfinite(value)
    ]
    if terms:
        scale = alt.Scale(domain=order, range=colours(order))
        yield (
            "bounds-terms",
            "Theorem 1's bound on the mean of E‖∇F(w_k)‖² by term, at the run's β or the largest "
            "admissible one, whichever is smaller.",
            fitted(
                plot(terms)
                .mark_bar()
                .encode(
                    y=alt.Y("method:N", sort=None, title=None),
                    x=alt.X("value:Q", title="bound"),
                    color=alt.Color(
                        "term:N",
                        scale=scale,
                        legend=alt.Legend(title=None, orient="top", columns=3),
                    ),
                    order=alt.Order("rank:Q"),
                    tooltip=["method:N", "term:N", "value:Q"],
                )
                .transform_calculate(rank=f"indexof({order}, datum.term)")
                .properties(width=WIDTH, height=34 * len(bounds.methods))
            ),
        )
    measured = [dict(row) for row in bounds.stationarity if math.isfinite(row.value or 0.0)]
    if measured:
        names = list(dict.fromkeys(row["method"] for row in measured))
        scale = alt.Scale(domain=names, range=colours(names))
        yield (
            "bounds-stationarity",
            "Measured ‖∇F(w_k)‖² by round, of each method's F (its ν), over agents in training.",
            fitted(
                plot(measured)
                .mark_line(point=alt.OverlayMarkDef(filled=False, size=45))
                .encode(
                    x=alt.X("round:Q", title="communication round", axis=alt.Axis(tickMinStep=1)),
                    y=alt.Y("value:Q", title="‖∇F(w)‖²", scale=alt.Scale(type="log")),
                    color=alt.Color(
                        "method:N",
                        scale=scale,
                        legend=alt.Legend(title=None, orient="top", columns=6),
                    ),
                    tooltip=["method:N", "round:Q", "value:Q"],
                )
                .properties(width=WIDTH, height=HEIGHT)
            ),
        )
