"""All charts of a report, and the learning curves: interactive on the page, and as SVG and PNG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from math import nan
from typing import Any

import altair as alt
import numpy as np

from nufed.report.agent_charts import agents_chart, first_agents, split_chart
from nufed.report.by_key import score_by_key
from nufed.report.differing_key import keyed_scores, one_differing_key
from nufed.report.fits_chart import fits_caption, fits_chart
from nufed.report.look import Look
from nufed.report.result_chart import result_chart
from nufed.report.style import (
    DASHED,
    DOTTED,
    GREY,
    HEIGHT,
    MAX_TICKS,
    WIDTH,
    end_labels,
    fitted,
    method_colour,
    method_shape,
    plot,
    spread_labels,
    tooltips,
)
from nufed.report.tables import all_groups, label, run_name
from nufed.report.training_chart import training_charts
from nufed.runs import Run
from nufed.runs.records import MetricsLine
from nufed.runs.results import Line


def all_charts(runs: Sequence[Run]) -> Iterator[tuple[str, str, Any]]:
    """Every chart of a report as (file name, caption, chart).

    Several runs have a chart each, with the same colours, symbols and range of scores, and one over
    the configuration key by which they differ, if it is one.
    """
    if len(runs) == 1 and (curves := fits_chart(runs[0])):
        yield "fits", fits_caption(runs[0]), curves
    look = Look.of(runs)
    cut = " Triangles at the edge: beyond the axis, or diverged." if look.clipped else ""
    key = one_differing_key(runs)
    for group in all_groups(runs) if key else ():
        yield (
            f"by-key-{group}",
            f"{_score(runs)} of personal models by {key}, agents {group} in training. "
            "Bars: 95 % confidence intervals; grey: null baselines.",
            score_by_key(
                keyed_scores(runs, key, group),
                key,
                title=look.title,
                percent=look.percent,
                styles=look.styles,
            ),
        )
    for group in all_groups(runs):
        yield from _of_each(
            runs,
            f"results-{group}",
            f"{_score(runs)} of the shown models, agents {group} in training. Filled: personal "
            "models, with 95 % confidence intervals; open: the global model; grey: null baselines."
            + cut,
            [result_chart(run, group, look) for run in runs],
        )
    for group in all_groups(runs):
        yield from _of_each(
            runs,
            f"rounds-{group}",
            f"{_score(runs)} of personal models after {_steps(runs)} fine-tuning steps by round, "
            f"agents {group} in training, with the step size of fine-tuning {_sized_by_round(runs)}"
            ". Lines: mean over agents and seeds; bands: range over seeds; dotted: the method's "
            f"global model; dashed: null baselines.{cut}",
            [rounds_chart([run], group, look) for run in runs],
        )
    for run in runs:
        for name, caption, chart in training_charts(run, look):
            several = len(runs) > 1
            number = f"-{runs.index(run) + 1}" if several else ""
            yield name + number, f"{run_name(run, runs)}: {caption}" if several else caption, chart
    yield from _of_each(
        runs,
        "steps",
        f"{_score(runs)} of personal models by number of fine-tuning steps, agents "
        f"seen in training. Bands: range over seeds; dashed: null baselines.{cut}",
        [steps_chart([run], look) for run in runs],
    )
    yield from _of_each(
        runs,
        "agents",
        f"{_score(runs)} of individual agents' personal models after {_steps(runs)} fine-tuning "
        "steps, agents seen in training, all seeds. Boxes: quartiles; whiskers: range; "
        "points: agents.",
        [agents_chart([run], look) for run in runs],
    )
    for run in runs:
        if next(iter(run.splits.values())).classes:
            name = "split" if len(runs) == 1 else f"split-{runs.index(run) + 1}"
            first = run.config.seeds[0]
            of = run_name(run, runs)
            caption = f"Samples per agent{first_agents(run)} and class, {of}, seed {first}."
            yield name, caption, split_chart(run)


def _of_each(
    runs: Sequence[Run], name: str, caption: str, charts: Sequence[Any]
) -> Iterator[tuple[str, str, Any]]:
    """One chart of each run; the first of several has the whole caption."""
    if len(runs) == 1:
        yield name, caption, charts[0]
        return
    for number, (run, chart) in enumerate(zip(runs, charts, strict=True), start=1):
        own = f"{run_name(run, runs)}: {caption}" if number == 1 else run_name(run, runs)
        yield f"{name}-{number}", own, chart


def evaluation_by_round(run: Run) -> str:
    """The key of a round's line that learning curves are drawn from."""
    by_round = run.config.eval_lr == "chosen_by_round" and run.step_sizes_chosen
    return "evaluation_chosen" if by_round else "evaluation"


def _sized_by_round(runs: Sequence[Run]) -> str:
    keys = {evaluation_by_round(run) for run in runs}
    words = {"evaluation": "as trained", "evaluation_chosen": "chosen in every round"}
    return " or ".join(words[key] for key in sorted(keys))


def rounds_chart(runs: Sequence[Run], group: str, look: Look | None = None) -> Any:
    """Score by round, of personal models and of the global one."""
    points = []
    shared: dict[tuple[str, str], list[dict[str, Any]]] = {}  # once for a method with several lines
    for run, name, line in _lines(runs, "method"):
        if group not in run.groups:
            continue
        key = evaluation_by_round(run)
        seeds = [[m for m in t.metrics if group in getattr(m, key)] for t in line.seeds.values()]
        own = []
        for same_round in _by_round(seeds):
            found, at = [getattr(m, key)[group] for m in same_round], same_round[0].round
            points.append(_point(name, "round", at, [f.score[line.steps] for f in found]))
            own.append(
                _point(
                    name,
                    "round",
                    at,
                    [nan if f.global_score is None else f.global_score for f in found],
                )
            )
        shared.setdefault((str(run.path), line.name), own)
    dotted = [point for own in shared.values() for point in own]
    last = max((point["round"] for point in points), default=0)
    nulls = _null_lines(runs, group, "round", last)
    return _curves(look or Look.of(runs), points, "round", "communication round", nulls, dotted)


def _by_round(seeds: Sequence[Sequence[MetricsLine]]) -> list[list[MetricsLine]]:
    """The lines of each round, of the seeds that have reached it."""
    found: dict[int, list[MetricsLine]] = {}
    for line in (line for lines in seeds for line in lines):
        found.setdefault(line.round, []).append(line)
    return [found[round] for round in sorted(found)]


def steps_chart(runs: Sequence[Run], look: Look | None = None) -> Any:
    """Score by number of fine-tuning steps."""
    points = []
    for run in runs:
        for method, part in run.methods.items():
            for step in range(run.config.steps_evaluated + 1):
                scores = [_seen_mean(t.final, step) for t in part.values()]
                points.append(_point(label(run, method, runs), "step", step, scores))
    nulls = _null_lines(runs, "seen", "step", None)
    return _curves(look or Look.of(runs), points, "step", "fine-tuning steps", nulls)


def _curves(
    look: Look,
    points: list[dict[str, Any]],
    x: str,
    x_title: str,
    nulls: list[dict[str, Any]],
    shared: Sequence[dict[str, Any]] = (),
) -> Any:
    """Mean lines with bands over seeds, global models dotted, and the null baselines dashed."""
    names = list(dict.fromkeys(point["method"] for point in points))
    points = [p for p in points if all(math.isfinite(p[k]) for k in ("mean", "low", "high"))]
    colour = method_colour(names, look.styles)
    last = max((point[x] for point in points), default=0)
    # explicit ticks for few steps: Vega would place some in between
    ticks = {"values": list(range(last + 1))} if last <= MAX_TICKS else {"tickMinStep": 1}
    axis = alt.X(f"{x}:Q", title=x_title, axis=alt.Axis(format="d", **ticks))
    base = plot(points).encode(x=axis, color=colour)

    def height(field: str) -> Any:
        return look.axis(alt.Y, field)

    clip = {"clip": True} if look.clipped else {}
    band = base.mark_area(opacity=0.15, **clip).encode(y=height("low"), y2=alt.Y2("high:Q"))
    line = base.mark_line(strokeWidth=2, **clip).encode(y=height("mean"))
    # open symbols of different shapes distinguish methods whose lines coincide
    point = base.mark_point(size=55, strokeWidth=1.5, **clip).encode(
        y=height("mean"),
        shape=method_shape(names, look.styles),
        tooltip=tooltips(["method", x], ["mean", "low", "high"], look.percent),
    )
    shared = [p for p in shared if math.isfinite(p["mean"])]
    dotted = plot(shared).encode(x=axis, y=height("mean"), color=colour)
    dashed = plot(nulls).encode(x=axis, y=height("mean"), detail="method:N")
    ends = {line["method"]: line for line in nulls}  # the last point of each
    labels = spread_labels(list(ends.values()), points + nulls, look.domain)
    named = plot(labels).encode(x=axis)
    chart = alt.layer(
        dashed.mark_line(strokeDash=DASHED, color=GREY, **clip),
        *([dotted.mark_line(strokeDash=DOTTED, strokeWidth=1.5, **clip)] if shared else []),
        *look.edges([*points, *shared], alt.Y, x=axis, color=colour),
        end_labels(named, height("mean")),
        band,
        line,
        point,
    ).properties(width=WIDTH, height=HEIGHT)
    return fitted(chart, [str(name) for name in ends])


def _null_lines(runs: Sequence[Run], group: str, x: str, last: int | None) -> list[dict[str, Any]]:
    """The baselines' mean scores: constant up to ``last``, or (None) by number of steps."""
    lines = []
    for run, name, line in _lines(runs, "baseline"):
        scores = [s for seed in line.scores(group) for s in seed]
        if not scores:
            continue
        for at in range(run.config.steps_evaluated + 1) if last is None else (0, last):
            steps = at if last is None else line.steps
            value = float(np.mean([s.score[steps] for s in scores]))
            if math.isfinite(value):
                lines.append({"method": name, x: at, "mean": value})
    return lines


def _lines(runs: Sequence[Run], kind: str) -> list[tuple[Run, str, Line]]:
    """The lines of the runs' results, with names that are unique across runs."""
    return [
        (run, label(run, line.label, runs), line)
        for run in runs
        for line in run.lines()
        if kind == line.kind
    ]


def _point(name: str, x: str, at: int, scores: Sequence[float]) -> dict[str, Any]:
    mean = float(np.mean(scores))
    return {"method": name, x: at, "mean": mean, "low": min(scores), "high": max(scores)}


def _seen_mean(scores: Any, step: int) -> float:
    return float(np.mean([s.score[step] for s in scores if s.seen]))


def _score(runs: Sequence[Run]) -> str:
    return f"{runs[0].config.eval_on.capitalize()} {runs[0].measure.name}"


def _steps(runs: Sequence[Run]) -> str:
    found = {line.steps for run in runs for line in run.lines() if line.kind == "method"}
    return " or ".join(map(str, sorted(found)))
