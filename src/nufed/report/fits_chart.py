"""The chart of fitted curves: some agents' models before and after fine-tuning."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from nufed.runs import Run

STEPS = ["#999999", "#56B4E9", "#D55E00"]  # colours of no, one and all steps
SIZE = 150  # of one panel, in pixels
MAX_METHODS = 5  # columns


def fits_caption(run: Run) -> str:
    """What the chart shows."""
    _, fits = _fits(run)[0]
    who = "agents" if fits[0].seen else "newcomers, which took no part in training"
    return (
        f"Models of {len(fits)} {who}, before and after fine-tuning, seed {run.config.seeds[0]}. "
        "Large points: the samples that an agent fine-tunes on; small points: its test samples."
    )


def fits_chart(run: Run) -> Any | None:
    """Curves of the models of some agents by method and fine-tuning steps; None without any.

    A column per method, a row per agent, a line per number of steps (none, one, the number shown).
    Curves that leave the range of the samples by more than its width are cut there.
    """
    found = _fits(run)
    if not found:
        return None
    rows: list[dict[str, Any]] = []
    for method, fits in found:
        shown = run.config.steps_of(method)[0]
        for fit in fits:
            place = {"method": method, "agent": f"agent {fit.name}"}
            for steps in sorted({0, min(1, shown), shown}):
                curve = zip(fit.grid, fit.predicted[steps], strict=True)
                rows += [{**place, "steps": str(steps), "x": x, "y": y} for x, y in curve]
            for kind, inputs, targets in (
                ("training", fit.train_inputs, fit.train_targets),
                ("test", fit.test_inputs, fit.test_targets),
            ):
                points = zip(inputs, targets, strict=True)
                rows += [{**place, "samples": kind, "x": x, "y": y} for x, y in points]
    drawn = sorted({row["steps"] for row in rows if "steps" in row}, key=int)
    colours = alt.Scale(domain=drawn, range=STEPS[-len(drawn) :])
    targets = [row["y"] for row in rows if "samples" in row]
    low, high = 2 * min(targets) - max(targets), 2 * max(targets) - min(targets)
    clip = math.isfinite(high - low) and any(not low <= row["y"] <= high for row in rows)
    scale = alt.Scale(domain=[low, high]) if clip else alt.Undefined
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("x:Q", title="input"), y=alt.Y("y:Q", title="output", scale=scale)
    )
    lines = (
        base.transform_filter("isValid(datum.steps)")
        .mark_line(clip=clip or alt.Undefined)
        .encode(
            color=alt.Color("steps:N", scale=colours, title="fine-tuning steps"),
            order="x:Q",
            tooltip=["method:N", "agent:N", "steps:N", "x:Q", "y:Q"],
        )
    )
    points = (
        base.transform_filter("isValid(datum.samples)")
        .mark_point(filled=True, color="#777777", opacity=0.8)
        .encode(
            size=alt.Size("samples:N", scale=alt.Scale(domain=["training", "test"], range=[45, 6])),
            tooltip=["agent:N", "samples:N", "x:Q", "y:Q"],
        )
    )
    panels = (points + lines).properties(width=SIZE, height=SIZE)
    columns = [method for method, _ in found]
    return panels.facet(
        column=alt.Column("method:N", sort=columns, title=None), row=alt.Row("agent:N", title=None)
    )


def _fits(run: Run) -> list[tuple[str, list[Any]]]:
    """The curves of every method's first seed, of a few methods."""
    firsts = [(name, next(iter(seeds.values())).fits) for name, seeds in run.methods.items()]
    return [(name, fits) for name, fits in firsts if fits][:MAX_METHODS]
