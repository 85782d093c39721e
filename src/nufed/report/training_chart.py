"""Charts of training itself: its loss and the norm of the server's update, by round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import numpy as np

from nufed.report.look import Look
from nufed.report.style import HEIGHT, WIDTH, fitted, method_colour, method_shape, plot
from nufed.runs import Run
from nufed.runs.jumps import jumps
from nufed.runs.results import Trained

SIGNALS = {
    "training-loss": ("training_loss", "training loss", "mean loss on the cohort's training data"),
    "training-update": ("update_norm", "update norm", "norm of the server's change of the model"),
}
MAX_ROUNDS = 400  # points of a line; of more rounds, evenly spaced ones are drawn
LOG_RATIO = 20  # values that span more than this are drawn on a logarithmic axis
ALARM = "#D62728"


def training_charts(run: Run, look: Look) -> Iterator[tuple[str, str, Any]]:
    """A chart of each signal that the run has recorded, as (file name, caption, chart)."""
    for name, (field, title, what) in SIGNALS.items():
        chart = signal_chart(run, field, title, look)
        if chart is not None:
            yield (
                name,
                f"{title.capitalize()} by round: {what}. Lines: mean over seeds; bands: range over "
                "seeds; red rings: jumps, far above the rounds before.",
                chart,
            )


def signal_chart(run: Run, field: str, title: str, look: Look) -> Any | None:
    """A signal of training by round and method, with its jumps; None if it was not recorded."""
    points, flagged = [], []
    for name, part in run.methods.items():
        by_round: dict[int, list[float]] = {}
        for seed, trained in part.items():
            series = _series(trained, field)
            for round, value in series:
                by_round.setdefault(round, []).append(value)
            flagged += [
                {"method": name, "seed": seed, "round": round, "value": value, "before": median}
                for round, value, median in jumps(series)
                if math.isfinite(value)
            ]
        for round in _some(sorted(by_round)):
            values = by_round[round]
            if all(map(math.isfinite, values)):
                mean = float(np.mean(values))
                low, high = min(values), max(values)
                points.append(
                    {"method": name, "round": round, "mean": mean, "low": low, "high": high}
                )
    return _chart(points, flagged, title, look) if points else None


def _series(trained: Trained, field: str) -> list[tuple[int, float]]:
    """A signal with its rounds, where it was recorded (a missing one is None or NaN)."""
    found = [(m.round, getattr(m, field)) for m in trained.metrics if field in m.model_fields_set]
    return [(round, math.nan if value is None else value) for round, value in found]


def _some(rounds: Sequence[int]) -> list[int]:
    step = max(1, math.ceil(len(rounds) / MAX_ROUNDS))
    return list(rounds[::step])


def _chart(
    points: list[dict[str, Any]], flagged: list[dict[str, Any]], title: str, look: Look
) -> Any:
    names = list(dict.fromkeys(point["method"] for point in points))
    values = [point[key] for point in points for key in ("low", "high")]
    values += [jump["value"] for jump in flagged]
    log = min(values) > 0 and max(values) > LOG_RATIO * min(values)
    scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=False)

    def height(field: str) -> Any:
        axis = alt.Axis(format="~g", tickCount=6)
        return alt.Y(f"{field}:Q", title=title, scale=scale, axis=axis)

    x = alt.X("round:Q", title="communication round", axis=alt.Axis(format="d", tickMinStep=1))
    colour = method_colour(names, look.styles)
    base = plot(points).encode(x=x, color=colour)
    few = len(points) <= 40 * len(names)
    numbers = [alt.Tooltip(f"{key}:Q", format=".4~g") for key in ("mean", "low", "high")]
    circled = [
        *(alt.Tooltip(f"{key}:N") for key in ("method", "seed", "round")),
        *(alt.Tooltip(f"{key}:Q", format=".4~g") for key in ("value", "before")),
    ]
    chart = alt.layer(
        base.mark_area(opacity=0.15).encode(y=height("low"), y2="high:Q"),
        base.mark_line(strokeWidth=1.5).encode(y=height("mean")),
        base.mark_point(size=40 if few else 8, strokeWidth=1.2).encode(
            y=height("mean"),
            shape=method_shape(names, look.styles),
            tooltip=[alt.Tooltip("method:N"), alt.Tooltip("round:N"), *numbers],
        ),
        plot(flagged)
        .mark_circle(size=190, filled=False, strokeWidth=2.5, color=ALARM)
        .encode(x=x, y=height("value"), tooltip=circled),
    ).properties(width=WIDTH, height=HEIGHT)
    return fitted(chart)
