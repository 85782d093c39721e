"""The chart of docs/board.md: the rank of every method on every measured problem."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import altair as alt
import numpy as np

if TYPE_CHECKING:
    from board.page import Shown

FOLDER = "results"  # below that of the page


def write(measured: Sequence[Shown], folder: Path) -> str:
    """Write the chart as SVG; its path relative to the page."""
    names = dict.fromkeys(name for shown in measured for name in shown.ranked)
    last = 1 + max(len(shown.ranked) for shown in measured)
    average = {
        name: np.mean([s.ranked[name].rank if name in s.ranked else last for s in measured])
        for name in names
    }
    rows = [
        {
            "method": name,
            "problem": shown.title,
            "rank": place.rank,
            "tied": place.tied,
        }
        for shown in measured
        for name, place in shown.ranked.items()
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("problem:N", sort=[s.title for s in measured], title=None).axis(
            labelAngle=-40, orient="top", labelLimit=260
        ),
        y=alt.Y("method:N", sort=sorted(names, key=lambda n: average[n]), title=None),
    )
    filled = base.mark_rect(stroke="white").encode(
        color=alt.condition("datum.tied", alt.value("#4c78a8"), alt.value("#eef1f5"))
    )
    text = base.mark_text(fontSize=10).encode(
        text="rank:Q",
        color=alt.condition("datum.tied", alt.value("white"), alt.value("#333333")),
    )
    chart = (filled + text).properties(width=alt.Step(58), height=alt.Step(15))
    path = folder / FOLDER / "board.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.save(path)
    return f"{FOLDER}/{path.name}"
