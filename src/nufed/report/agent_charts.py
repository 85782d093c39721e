"""Charts of individual agents: their scores, and their samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from nufed.report.look import Look
from nufed.report.style import GREY, ROW, WIDTH, fitted, plot, score_axis, tooltips
from nufed.report.tables import label
from nufed.runs import Run

MAX_AGENTS = 100  # in the chart of a split
MAX_POINTS = 3000  # agents drawn individually, in all rows


def agents_chart(runs: Sequence[Run], look: Look | None = None) -> Any:
    """The distribution of scores over agents, with a point for each."""
    look = look or Look.of(runs)
    rows = [
        {
            "method": label(run, line.label, runs),
            "score": s.score[line.steps],
            "agent": s.name,
            "seed": seed,
        }
        for run in runs
        for line in run.lines()
        for seed, scores in zip(line.seeds, line.scores("seen"), strict=True)
        for s in scores
        if math.isfinite(s.score[line.steps])
    ]
    names = list(dict.fromkeys(str(row["method"]) for row in rows))
    palette = look.styles.colours(names)
    base = plot(rows).encode(
        y=alt.Y("method:N", sort=names, title=None),
        x=score_axis(alt.X, "score", look.title, look.percent, look.agents_domain),
    )
    colour = alt.Color("method:N", scale=alt.Scale(domain=names, range=palette), legend=None)
    clip = {"clip": True} if look.clipped else {}
    boxes = base.mark_boxplot(
        extent="min-max", size=18, opacity=0.55, median={"color": GREY}, **clip
    ).encode(color=colour)
    points = (
        base.mark_circle(size=22, opacity=0.6, **clip)
        .encode(
            color=colour,
            yOffset=alt.YOffset("place:Q", scale=alt.Scale(domain=[-1, 1])),
            tooltip=tooltips(["method", "agent", "seed"], ["score"], look.percent),
        )
        # a fixed scatter, so that equal scores do not hide each other
        .transform_window(number="row_number()", groupby=["method"])
        .transform_calculate(place="((datum.number * 0.618034) % 1) * 0.9 - 0.45")
    )
    layers = [boxes, points] if len(rows) <= MAX_POINTS else [boxes]
    return fitted(alt.layer(*layers).properties(width=WIDTH, height=(ROW + 6) * len(names)))


def first_agents(run: Run) -> str:
    """Which agents the chart of a split shows, where not all."""
    return f" (the first {MAX_AGENTS} of {run.agents})" if run.agents > MAX_AGENTS else ""


def split_chart(run: Run) -> Any:
    """The number of samples per agent and class."""
    split = run.splits[run.config.seeds[0]]
    agents = split.agents[:MAX_AGENTS]
    return counts_chart(
        [agent.name for agent in agents],
        split.classes,
        [agent.counts for agent in agents],
    )


def counts_chart(agents: Sequence[str], classes: Sequence[str], counts: Any) -> Any:
    """A heat map of samples per agent and class."""
    rows = [
        {"agent": agent, "class": name, "samples": count}
        for agent, own in zip(agents, counts, strict=True)
        for name, count in zip(classes, own, strict=True)
    ]
    chart = (
        plot(rows)
        .mark_rect(stroke=GREY, strokeOpacity=0.15)
        .encode(
            x=alt.X("agent:N", sort=list(agents), axis=alt.Axis(labelOverlap=True, labelAngle=0)),
            y=alt.Y("class:N", sort=list(classes), axis=alt.Axis(labelOverlap=True)),
            color=alt.Color("samples:Q", legend=alt.Legend(orient="top", gradientLength=140)),
            tooltip=["agent:N", "class:N", "samples:Q"],
        )
        .properties(width=max(WIDTH, 8 * len(agents)), height=max(180, min(600, 16 * len(classes))))
    )
    return fitted(chart)
