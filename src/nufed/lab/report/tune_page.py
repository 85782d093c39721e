"""The page of ``nufed tune``: one HTML file that opens offline, in the style of reports.

The charts of ``nufed tune``: best score by work, and scores by the value of each setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import altair as alt

from nufed.lab.analysis.tuning_findings import best_so_far, doubts, edges, ranking_notes
from nufed.lab.report.figures import draw, spec_of
from nufed.lab.report.page import save_page, template
from nufed.lab.report.style import HEIGHT, WIDTH, colours, plot, shapes
from nufed.lab.report.tune_tables import (
    certainty_table,
    choices_table,
    search_table,
    sensitivity_table,
    trials_table,
    tune_headline,
    work_table,
)
from nufed.lab.runs.tuning_record import TuningRecord


def tune_charts(record: TuningRecord) -> Iterator[tuple[str, str, Any]]:
    """Every chart of the page as (file name, caption, chart)."""
    search = record.search
    points = best_so_far(record)
    if points:
        yield (
            "tune-best",
            f"Best validation {search.measure} of a fully trained trial by the work spent on its "
            f"method, one point per batch of trials. The unit is {search.unit:,.0f} gradients, one "
            "full training by the cheapest method.",
            best_chart(record, points),
        )
    names = dict.fromkeys(own.setting for m in search.methods.values() for own in m.ranges)
    for setting in names:
        values = setting_points(record, setting)
        if len(values) > 1:
            yield (
                f"tune-{setting}",
                f"Validation {search.measure} of all trials by {setting}, after the rounds that "
                "each was trained for; other settings vary, too. Filled: trained to the end. Much "
                "worse trials are drawn at the edge.",
                setting_chart(record, setting, values),
            )


def best_chart(record: TuningRecord, points: list[dict[str, Any]]) -> Any:
    """Best score so far by work, a line for each method."""
    names = list(record.search.methods)
    most = record.search.budget
    if record.search.per == "trial":
        most = max(point["work"] for point in points)
    base = plot(points).encode(
        x=alt.X(
            "work:Q",
            title="work spent (full trainings by the cheapest method)",
            scale=alt.Scale(domain=[0, most], nice=False),
        ),
        y=_score_axis(record),
        color=_colour(names),
        tooltip=["method:N", "work:Q", "score:Q", "trials:Q"],
    )
    line = base.mark_line(interpolate="step-after", strokeWidth=2)
    return _sized(alt.layer(line, base.mark_point(size=45, filled=True).encode(_shape(names))))


def setting_points(record: TuningRecord, setting: str) -> list[dict[str, Any]]:
    """The score of every trial that has one, with its value of a setting."""
    rounds = record.search.rungs[-1]
    return [
        {
            "method": trial.method,
            "value": trial.settings[setting],
            "score": scored[-1].score,
            "rounds": scored[-1].rounds,
            "trial": trial.number,
            "whole": scored[-1].rounds == rounds,
        }
        for trial in record.trials
        if setting in trial.settings
        and (scored := [rung for rung in trial.rungs if rung.failure is None])
    ]


def setting_chart(record: TuningRecord, setting: str, points: list[dict[str, Any]]) -> Any:
    """Scores by the value of one setting."""
    search = record.search
    ranges = [r for m in search.methods for r in record.ranges(m) if r.setting == setting]
    names = list(search.methods)
    if any(own.choices for own in ranges):
        x = alt.X("value:N", title=setting)
    else:
        ends = [min(own.low for own in ranges), max(own.high for own in ranges)]
        log = all(own.log for own in ranges)
        scale = alt.Scale(type="log" if log else "linear", domain=ends, nice=False)
        x = alt.X("value:Q", title=setting, scale=scale, axis=alt.Axis(format="~g"))
    chart = (
        plot(points)
        .mark_point(size=60)
        .encode(
            x=x,
            y=_score_axis(record, _limits(record, [point["score"] for point in points])),
            color=_colour(names),
            shape=_shape(names),
            fillOpacity=alt.condition("datum.whole", alt.value(1), alt.value(0)),
            fill=_colour(names),
            opacity=alt.condition("datum.whole", alt.value(1), alt.value(0.5)),
            tooltip=["method:N", "trial:Q", "value:N", "score:Q", "rounds:Q"],
        )
    )
    return _sized(chart)


def _colour(names: Sequence[str]) -> Any:
    scale = alt.Scale(domain=list(names), range=colours(names))
    legend = alt.Legend(title=None, orient="top", symbolOpacity=1, symbolSize=80, columns=6)
    return alt.Color("method:N", scale=scale, legend=legend)


def _shape(names: Sequence[str]) -> Any:
    scale = alt.Scale(domain=list(names), range=shapes(names))
    return alt.Shape("method:N", scale=scale, legend=None)


def _limits(record: TuningRecord, scores: list[float]) -> list[float] | None:
    """Where to clip an axis of scores: as far beyond the median as it is from the best, twice."""
    sign = 1 if record.search.higher_is_better else -1
    best, middle = sign * max(sign * score for score in scores), median(scores)
    worst = middle + 2 * (middle - best)
    if middle == best or all(sign * score >= sign * worst for score in scores):
        return None
    return sorted([best, worst])


def _score_axis(record: TuningRecord, limits: list[float] | None = None) -> Any:
    scale = alt.Scale(zero=False) if limits is None else alt.Scale(domain=limits, clamp=True)
    percent = record.search.measure == "accuracy"
    return alt.Y(
        "score:Q",
        title=f"validation {record.search.measure}",
        scale=scale,
        axis=alt.Axis(format="%" if percent else "~g"),
    )


def _sized(chart: Any) -> Any:
    return chart.properties(width=WIDTH, height=HEIGHT)


PAGE = "tune.html"


def build_tune_page(record: TuningRecord, out: Path, *, figures: bool = True) -> Path:
    """Write ``tune.html`` and, with ``figures``, its charts as SVG and PNG files into ``out``."""
    charts = list(tune_charts(record))
    specs = {name: spec_of(chart) for name, _, chart in charts}
    drawn = draw(specs if figures else {}, javascript=True)
    captions = [(name, caption) for name, caption, _ in charts]
    page = template("tune.html.j2").render(
        title=f"{record.search.config['name']}, tuned",
        headline=tune_headline(record),
        choices=choices_table(record),
        edges=edges(record),
        doubts=doubts(record),
        sensitivity=sensitivity_table(record),
        certainty=certainty_table(record),
        ranking=ranking_notes(record),
        work=work_table(record),
        trials=trials_table(record),
        search=search_table(record),
        best=captions[:1],
        settings=captions[1:],
        specs=specs,
        drawn=drawn,
    )
    encoded = page.encode("utf-8", "backslashreplace")
    return save_page(encoded, drawn, out, "nufed tune --resume", PAGE)
