"""All charts: interactive on a page, and as SVG and PNG.

In this order: the charts of a report (learning curves, results, scores by configuration key, fitted
curves, training, agents and their samples), and those of ``nufed bounds``, ``nufed advise`` and
``nufed tune``.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from statistics import median
from typing import Any

import altair as alt
import numpy as np

from nufed.lab.analysis.advise import Advice, Curve
from nufed.lab.analysis.comparison import KeyedScore, KeyValue, one_differing_key, scores_of_runs
from nufed.lab.analysis.tuning_findings import best_so_far
from nufed.lab.report.analysis_tables import TERMS
from nufed.lab.report.figures import Chart
from nufed.lab.report.page import caption
from nufed.lab.report.style import (
    DASHED,
    DOTTED,
    GREY,
    HEIGHT,
    MAX_TICKS,
    ROW,
    WIDTH,
    Look,
    Styles,
    end_labels,
    fitted,
    interval,
    method_colour,
    method_shape,
    number_format,
    plot,
    score_axis,
    spread_labels,
    tooltips,
)
from nufed.lab.report.tables import all_groups, run_name
from nufed.lab.runs import Run
from nufed.lab.runs.json_files import or_nan
from nufed.lab.runs.records import BoundsRecord, MetricsLine
from nufed.lab.runs.results import Line, Trained
from nufed.lab.runs.tuning_record import TuningRecord
from nufed.lab.runs.warnings import jumps

MAX_AGENTS = 100  # in the chart of a split
MAX_POINTS = 3000  # agents drawn individually, in all rows
LOG_RATIO = 20  # values that span more than this are drawn on a logarithmic axis
MAX_ROUNDS = 400  # points of a line; of more rounds, evenly spaced ones are drawn
STEPS = ["#999999", "#56B4E9", "#D55E00"]  # colours of no, one and all steps
PANEL = 150  # of one agent's curves, in pixels
MAX_METHODS = 5  # columns of panels
SIGNALS = {
    "training-loss": ("training_loss", "training loss", "mean loss on the cohort's training data"),
    "training-update": ("update_norm", "update norm", "norm of the server's change of the model"),
}
ALARM = "#D62728"
_FIELD = "value"  # of a key: its name has dots, which Vega takes for nested fields


def all_charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Every chart of a report.

    Several runs have a chart each, with the same colours, symbols and range of scores, and one over
    the configuration key by which they differ, if it is one.
    """
    look, groups = Look.of(runs), all_groups(runs)
    if len(runs) == 1 and (curves := fits_chart(runs[0])):
        yield "fits", fits_caption(runs[0]), curves
    if len(runs) == 1 and (guessed := guesses_chart(runs[0], look)):
        yield "guesses", guesses_caption(runs[0], look), guessed
    if key := one_differing_key(runs):
        yield from _charts_by_key(runs, key, look)
    for name, words, chart_of in _charts_of_scores(runs, groups, look):
        yield from _of_each(runs, name, words, [chart_of(run) for run in runs])
        if name == f"rounds-{groups[-1]}":
            yield from _charts_of_training(runs, look)
    for run in runs:
        if next(iter(run.splits.values())).classes:
            some = f" (the first {MAX_AGENTS} of {run.agents})" if run.agents > MAX_AGENTS else ""
            of, seed = run_name(run, runs), run.config.seeds[0]
            words = caption("split", some=some, run=of, seed=seed)
            yield _numbered("split", run, runs), words, split_chart(run)


def _charts_by_key(runs: Sequence[Run], key: str, look: Look) -> Iterator[Chart]:
    for group in all_groups(runs):
        chart = score_by_key(
            scores_of_runs(runs, key, group),
            key,
            title=look.title,
            percent=look.percent,
            styles=look.styles,
        )
        words = caption("by_key", score=_score(runs), key=key, group=group)
        yield f"by-key-{group}", words, chart


def _charts_of_scores(
    runs: Sequence[Run], groups: Sequence[str], look: Look
) -> Iterator[tuple[str, str, Callable[[Run], Any]]]:
    """Name, caption, and what draws a run: results, learning curves, steps and agents."""
    score = _score(runs)
    cut = " " + caption("edges") if look.clipped else ""
    counts = {line.steps for run in runs for line in run.lines() if line.kind == "method"}
    steps = " or ".join(map(str, sorted(counts))) + " fine-tuning step" + "s" * (counts != {1})
    sizes = _sized_by_round(runs)
    for group in groups:
        words = caption("results", score=score, group=group) + cut
        yield f"results-{group}", words, partial(result_chart, group=group, look=look)
    for group in groups:
        words = caption("rounds", score=score, steps=steps, group=group, sizes=sizes) + cut
        yield f"rounds-{group}", words, partial(rounds_chart, group=group, look=look)
    if any(run.own_rounds for run in runs):  # made to be compared at equal gradients
        for group in groups:
            words = caption("gradients", score=score, steps=steps, group=group, sizes=sizes) + cut
            yield f"gradients-{group}", words, partial(gradients_chart, group=group, look=look)
    yield "steps", caption("steps", score=score) + cut, partial(steps_chart, look=look)
    words = caption("agents", score=score, steps=steps)
    yield "agents", words, partial(agents_chart, look=look)


def _charts_of_training(runs: Sequence[Run], look: Look) -> Iterator[Chart]:
    for run in runs:
        before = f"{run_name(run, runs)}: " if len(runs) > 1 else ""
        for name, words, chart in training_charts(run, look):
            yield _numbered(name, run, runs), before + words, chart


def _of_each(runs: Sequence[Run], name: str, whole: str, charts: Sequence[Any]) -> Iterator[Chart]:
    """One chart of each run; the first of several has the whole caption."""
    for run, chart in zip(runs, charts, strict=True):
        words = whole
        if len(runs) > 1:
            words = run_name(run, runs) + (f": {whole}" if run is runs[0] else "")
        yield _numbered(name, run, runs), words, chart


def _numbered(name: str, run: Run, runs: Sequence[Run]) -> str:
    """The name of a chart, with the number of its run if there are several."""
    return name if len(runs) == 1 else f"{name}-{runs.index(run) + 1}"


def _score(runs: Sequence[Run]) -> str:
    return f"{runs[0].config.eval_on.capitalize()} {runs[0].measure.words}"


def rounds_chart(run: Run, group: str, look: Look | None = None) -> Any:
    """Score by round, of personal models and of the global one."""
    return _over_training(run, group, look, ("round", "communication round"), lambda line: 1)


def gradients_chart(run: Run, group: str, look: Look | None = None) -> Any:
    """Score by the gradients that all agents together have computed."""
    across = ("gradients", "gradients (a Hessian-vector product counts as two)")
    return _over_training(run, group, look, across, lambda line: line.gradients + 2 * line.hvps)


def _over_training(
    run: Run,
    group: str,
    look: Look | None,
    across: tuple[str, str],
    counted: Callable[[MetricsLine], int],
) -> Any:
    """Score by what ``counted`` adds up to over rounds."""
    key, points = evaluation_by_round(run), []
    x, _ = across
    shared: dict[str, list[dict[str, Any]]] = {}  # once for a method with several lines
    for line in _lines(run, "method"):
        seeds = [[m for m in t.metrics if group in getattr(m, key)] for t in line.seeds.values()]
        done = [
            list(accumulate(counted(m) if m.round else 0 for m in t.metrics))
            for t in line.seeds.values()
        ]
        dotted = []
        for same_round in _by_round(seeds):
            curves = [getattr(m, key)[group] for m in same_round]
            reached = same_round[0].round
            at = round(np.mean([sums[reached] for sums in done if len(sums) > reached]))
            global_scores = [or_nan(c.global_score) for c in curves]
            points.append(_point(line.label, x, at, [c.score[line.steps] for c in curves]))
            dotted.append(_point(line.label, x, at, global_scores))
        shared.setdefault(line.name, dotted)
    last = max((point[x] for point in points), default=0)
    nulls = _null_lines(run, group, x, last)
    return _curves(
        look or Look.of([run]),
        points,
        across,
        nulls,
        [point for curve in shared.values() for point in curve],
    )


def evaluation_by_round(run: Run) -> str:
    """The key of a round's line that learning curves are drawn from."""
    by_round = run.config.eval_lr == "chosen_by_round" and run.step_sizes_chosen
    return "evaluation_chosen" if by_round else "evaluation"


def _sized_by_round(runs: Sequence[Run]) -> str:
    keys = {evaluation_by_round(run) for run in runs}
    words = {"evaluation": "as trained", "evaluation_chosen": "chosen in every round"}
    return " or ".join(words[key] for key in sorted(keys))


def _by_round(seeds: Sequence[Sequence[MetricsLine]]) -> list[list[MetricsLine]]:
    """The lines of each round, of the seeds that have reached it."""
    lines: dict[int, list[MetricsLine]] = {}
    for line in chain.from_iterable(seeds):
        lines.setdefault(line.round, []).append(line)
    return [lines[round] for round in sorted(lines)]


def steps_chart(run: Run, look: Look) -> Any:
    """Score by number of fine-tuning steps."""
    points = []
    for method, part in run.methods.items():
        for step in range(run.config.steps_evaluated + 1):
            scores = [
                float(np.mean([s.score[step] for s in trained.final if s.seen]))
                for trained in part.values()
            ]
            points.append(_point(method, "step", step, scores))
    nulls = _null_lines(run, "seen", "step", None)
    return _curves(look, points, ("step", "fine-tuning steps"), nulls)


def _curves(
    look: Look,
    points: list[dict[str, Any]],
    across: tuple[str, str],
    nulls: list[dict[str, Any]],
    shared: Sequence[dict[str, Any]] = (),
) -> Any:
    """Mean lines with bands over seeds, global models dotted, and the null baselines dashed.

    ``across`` are the field and the title of the horizontal axis.
    """
    x, x_title = across
    names = list(dict.fromkeys(point["method"] for point in points))
    points = [p for p in points if all(math.isfinite(p[k]) for k in ("mean", "low", "high"))]
    colour = method_colour(names, look.styles)
    last = max((point[x] for point in points), default=0)
    axis = alt.X(f"{x}:Q", title=x_title, axis=_whole(0, last))
    base = plot(points).encode(x=axis, color=colour)

    def height(field: str) -> Any:
        return look.axis(alt.Y, field)

    clip = {"clip": True} if look.clipped else {}
    band = base.mark_area(fillOpacity=0.15, **clip).encode(y=height("low"), y2=alt.Y2("high:Q"))
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


def _null_lines(run: Run, group: str, x: str, last: int | None) -> list[dict[str, Any]]:
    """The baselines' mean scores: constant up to ``last``, or (None) by number of steps."""
    lines = []
    for line in _lines(run, "baseline"):
        scores = [s for seed in line.scores(group) for s in seed]
        if not scores:
            continue
        for at in range(run.config.steps_evaluated + 1) if last is None else (0, last):
            steps = at if last is None else line.steps
            value = float(np.mean([s.score[steps] for s in scores]))
            if math.isfinite(value):
                lines.append({"method": line.label, x: at, "mean": value})
    return lines


def _lines(run: Run, kind: str) -> list[Line]:
    return [line for line in run.lines() if line.kind == kind]


def _point(name: str, x: str, at: int, scores: Sequence[float]) -> dict[str, Any]:
    mean = float(np.mean(scores))
    return {"method": name, x: at, "mean": mean, "low": min(scores), "high": max(scores)}


def result_chart(run: Run, group: str, look: Look) -> Any:
    """A row for each method and null baseline, in the order of the table."""
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
    names = list(dict.fromkeys(s.method for s in scores if not s.baseline))
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
    trained = [row for row in rows if not row["baseline"]]
    nulls = [row for row in rows if row["baseline"]]
    bars = [row for row in trained if row["half_width"] is not None]
    colour = method_colour(names, styles)
    ends = {row["method"]: row for row in sorted(nulls, key=lambda row: order[row[_FIELD]])}
    chart = alt.layer(
        line(nulls, strokeDash=DASHED, color=GREY).encode(y=height("mean"), detail="method:N"),
        base(nulls).mark_point(size=30, color=GREY).encode(y=height("mean"), tooltip=hover),
        end_labels(base(spread_labels(list(ends.values()), rows)), height("mean")),
        base(bars)
        .mark_rule(opacity=0.45, strokeWidth=1.5)
        .encode(y=height("low"), y2="high:Q", color=colour),
        line(trained, strokeWidth=2).encode(y=height("mean"), color=colour),
        base(trained)
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
    averages = [math.fsum(means) / len(means) for means in cells.values()]
    rows = [
        {_FIELD: x, "other": y, "mean": mean} for (x, y), mean in zip(cells, averages, strict=True)
    ]
    shown = number_format(percent)
    columns, lines = (_order([score.keys[key] for score in scores]) for key in (across, down))
    middle = (min(averages) + max(averages)) / 2 if averages else 0.0
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


def fits_chart(run: Run) -> Any | None:
    """Curves of the models of some agents by method and fine-tuning steps; None without any.

    A column per method, a row per agent, a line per number of steps (none, one, the number shown).
    Curves that leave the range of the samples by more than its width are cut there.
    """
    by_method = _fits(run)
    if not by_method:
        return None
    rows: list[dict[str, Any]] = []
    for method, fits in by_method:
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
    palette = alt.Scale(domain=drawn, range=STEPS[-len(drawn) :])
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
            color=alt.Color("steps:N", scale=palette, title="fine-tuning steps"),
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
    panels = (points + lines).properties(width=PANEL, height=PANEL)
    columns = [method for method, _ in by_method]
    return panels.facet(
        column=alt.Column("method:N", sort=columns, title=None), row=alt.Row("agent:N", title=None)
    )


def fits_caption(run: Run) -> str:
    """The caption of the chart of fitted curves."""
    _, fits = _fits(run)[0]
    who = "agents" if fits[0].seen else "newcomers, which took no part in training"
    return caption("fits", agents=f"{len(fits)} {who}", seed=run.config.seeds[0])


def guesses_chart(run: Run, look: Look) -> Any | None:
    """Some newcomers' images with the guesses before, during and after fine-tuning, beside the
    scores of newcomers by round; None without any.

    A guess is drawn as an image of the guessed class, on the ground of whether it is right.
    """
    shown = _guesses(run)
    if shown is None:
        return None
    _, seen = shown
    titles = _guess_titles(len(seen[0].guessed) - 1)
    rows = []
    for row, (each, number) in enumerate((g, n) for g in seen for n in range(len(g.images))):
        images = dict(zip(each.classes, each.examples, strict=True))
        place = {"row": row, "who": f"newcomer {each.name}"}
        rows.append({**place, "column": DRAWING, "image": _png(each.images[number], each.sides)})
        for steps, title in titles.items():
            guess = each.guessed[steps][number]
            right = "right" if guess == each.labels[number] else "wrong"
            image = _png(images[guess], each.sides) if guess in images else ""
            rows.append({**place, "column": title, "image": image, "guess": right})
    columns = [DRAWING, *titles.values()]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("column:N", sort=columns, title=None, axis=alt.Axis(orient="top", labelAngle=0)),
        y=alt.Y("row:O", title=None, axis=None),
        tooltip=["who:N", "column:N", "guess:N"],
    )
    verdict = alt.Scale(domain=["right", "wrong"], range=["#009E73", "#D55E00"])
    ground = (
        base.transform_filter("isValid(datum.guess)")
        .mark_square(size=GUESS**2, opacity=1)
        .encode(color=alt.Color("guess:N", scale=verdict, title="the guess is"))
    )
    image = base.mark_image(width=GUESS - 6, height=GUESS - 6).encode(url="image:N")
    picture = (ground + image).properties(
        width=(GUESS + 22) * len(columns), height=(GUESS + 4) * (row + 1)
    )
    curves = rounds_chart(run, "unseen", look).properties(width=BESIDE)
    padding, curves.padding = curves.padding, alt.Undefined  # only the whole may have these two
    curves.autosize = alt.Undefined
    both = alt.hconcat(picture, curves, spacing=40, padding=padding)
    return both.resolve_scale(color="independent", shape="independent")


def guesses_caption(run: Run, look: Look) -> str:
    """The caption of the picture of guesses."""
    shown = _guesses(run)
    assert shown is not None
    method, some = shown
    words = caption("guesses", agents=len(some), method=method, seed=run.config.seeds[0])
    return words + (" " + caption("edges") if look.clipped else "")


DRAWING = "drawing"
GUESS, BESIDE = 34, 350  # of a guess, and of the curves beside, in pixels


def _guess_titles(steps: int) -> dict[int, str]:
    """The numbers of fine-tuning steps that are drawn, with their titles."""
    numbers = sorted({0, *(n for n in (1, 3) if n < steps), steps})
    return {n: "before" if not n else f"{n} step{'s' * (n != 1)}" for n in numbers}


def _guesses(run: Run) -> tuple[str, list[Any]] | None:
    """The method that is trained for the most steps, and its first seed's guesses."""
    firsts = {name: next(iter(seeds.values())).guesses for name, seeds in run.methods.items()}
    algorithms = run.config.algorithms()
    known = [name for name, some in firsts.items() if some]
    if not known:
        return None
    method = max(known, key=lambda name: algorithms[name].adaptation.steps)
    return method, firsts[method]


def _png(pixels: str, sides: tuple[int, int]) -> str:
    """An image of ink on white as a data address of a PNG file."""
    height, width = sides
    ink = 255 - np.frombuffer(bytes.fromhex(pixels), np.uint8).reshape(height, width)
    lines = b"".join(b"\0" + row.tobytes() for row in ink.repeat(3, 0).repeat(3, 1))

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", 3 * width, 3 * height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines, 9)), chunk(b"IEND", b"")
    content = b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _fits(run: Run) -> list[tuple[str, list[Any]]]:
    """The curves of every method's first seed, of a few methods."""
    firsts = [(name, next(iter(seeds.values())).fits) for name, seeds in run.methods.items()]
    return [(name, fits) for name, fits in firsts if fits][:MAX_METHODS]


def training_charts(run: Run, look: Look) -> Iterator[Chart]:
    """A chart of each signal that the run has recorded, as (file name, caption, chart)."""
    for name, (field, title, what) in SIGNALS.items():
        chart = signal_chart(run, field, title, look)
        if chart is not None:
            yield name, caption("training", title=title.capitalize(), what=what), chart


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
        for round in sorted(by_round)[:: math.ceil(len(by_round) / MAX_ROUNDS) or 1]:
            values = by_round[round]
            if all(map(math.isfinite, values)):
                mean = float(np.mean(values))
                low, high = min(values), max(values)
                points.append(
                    {"method": name, "round": round, "mean": mean, "low": low, "high": high}
                )
    return _chart(points, flagged, title, look) if points else None


def _whole(first: int, last: int) -> Any:
    """An axis of whole numbers. A few have explicit ticks: Vega would place some in between."""
    few = last - first <= MAX_TICKS
    return alt.Axis(
        format="d", **({"values": list(range(first, last + 1))} if few else {"tickMinStep": 1})
    )


def _series(trained: Trained, field: str) -> list[tuple[int, float]]:
    """A signal with its rounds, where it was recorded (a missing one is None or NaN)."""
    values = [(m.round, getattr(m, field)) for m in trained.metrics if field in m.model_fields_set]
    return [(round, or_nan(value)) for round, value in values]


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

    rounds = [point["round"] for point in points]
    x = alt.X("round:Q", title="communication round", axis=_whole(min(rounds), max(rounds)))
    colour = method_colour(names, look.styles)
    base = plot(points).encode(x=x, color=colour)
    few = len(points) <= 40 * len(names)
    numbers = [alt.Tooltip(f"{key}:Q", format=".4~g") for key in ("mean", "low", "high")]
    circled = [
        *(alt.Tooltip(f"{key}:N") for key in ("method", "seed", "round")),
        *(alt.Tooltip(f"{key}:Q", format=".4~g") for key in ("value", "before")),
    ]
    chart = alt.layer(
        base.mark_area(fillOpacity=0.15).encode(y=height("low"), y2="high:Q"),
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


def agents_chart(run: Run, look: Look) -> Any:
    """The distribution of scores over agents, with a point for each."""
    rows = [
        {"method": line.label, "score": s.score[line.steps], "agent": s.name, "seed": seed}
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


def split_chart(run: Run) -> Any:
    """The number of samples per agent and class."""
    split = run.splits[run.config.seeds[0]]
    agents = split.agents[:MAX_AGENTS]
    counts = [agent.counts for agent in agents]
    return counts_chart([agent.name for agent in agents], split.classes, counts)


def counts_chart(agents: Sequence[str], classes: Sequence[str], counts: Any) -> Any:
    """A heat map of samples per agent and class."""
    rows = [
        {"agent": agent, "class": name, "samples": count}
        for agent, by_class in zip(agents, counts, strict=True)
        for name, count in zip(classes, by_class, strict=True)
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


def bounds_charts(bounds: BoundsRecord) -> Iterator[Chart]:
    """Theorem 1's terms per method, and the measured stationarity by round."""
    order = list(TERMS.values())
    terms = [
        {"method": row.method, "term": TERMS[term], "value": value}
        for row in bounds.methods
        if row.promised
        for term, value in row.promised.terms.items()
        if value is not None and math.isfinite(value)
    ]
    if terms:
        scale = alt.Scale(domain=order, range=Styles.of(order).colours(order))
        yield (
            "bounds-terms",
            caption("bounds_terms"),
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
        yield (
            "bounds-stationarity",
            caption("bounds_stationarity"),
            fitted(
                plot(measured)
                .mark_line(point=alt.OverlayMarkDef(filled=False, size=45))
                .encode(
                    x=alt.X("round:Q", title="communication round", axis=alt.Axis(tickMinStep=1)),
                    y=alt.Y("value:Q", title="‖∇F(w)‖²", scale=alt.Scale(type="log")),
                    color=method_colour(names, Styles.of(names)),
                    tooltip=["method:N", "round:Q", "value:Q"],
                )
                .properties(width=WIDTH, height=HEIGHT)
            ),
        )


def advice_charts(advice: Advice) -> Iterator[Chart]:
    """Each method's score by number of steps, with its α; the recommendation with its spread."""
    yield "advice", "Scores by number of fine-tuning steps.", _advice_chart(advice)


def _advice_chart(advice: Advice) -> Any:
    best = advice.recommended_curve
    accuracy = advice.accuracy
    sign = 1 if accuracy else -1
    names = list(advice.auto)
    colour = method_colour(names, Styles.of(names))

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
        axis = alt.Axis(tickMinStep=1, format="d")
        return plot(values).encode(x=alt.X("steps:Q", title="fine-tuning steps", axis=axis))

    def height(field: str) -> Any:
        measure = "accuracy" if accuracy else "loss"
        return score_axis(alt.Y, field, f"{measure} on held-out samples", accuracy)

    lines = [row for curve in advice.curves if curve.times == 1 for row in rows(curve)]
    chosen = [row for row in rows(best) if row["steps"] == advice.recommended.steps]
    layers = [
        chart(rows(best))
        .mark_area(fillOpacity=0.15)
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
        dashed = chart(null).mark_line(strokeDash=DASHED, color=GREY).encode(y=height("mean"))
        text = chart(null[1:]).mark_text(align="left", dx=8, color=GREY, fontSize=11)
        layers += [dashed, text.encode(y=height("mean"), text="name:N")]
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)


def tune_charts(record: TuningRecord) -> Iterator[Chart]:
    """The best score by work, and scores by the value of each setting."""
    search = record.search
    points = best_so_far(record)
    if points:
        words = caption("tune_best", measure=search.measure, unit=f"{search.unit:,.0f}")
        yield "tune-best", words, _best_chart(record, points)
    settings = dict.fromkeys(each.setting for m in search.methods.values() for each in m.ranges)
    for setting in settings:
        values = _setting_points(record, setting)
        if len(values) > 1:
            words = caption("tune_setting", measure=search.measure, setting=setting)
            yield f"tune-{setting}", words, _setting_chart(record, setting, values)


def _best_chart(record: TuningRecord, points: list[dict[str, Any]]) -> Any:
    """Best score so far by work, a line for each method."""
    names = list(record.search.methods)
    styles = Styles.of(names)
    most = record.search.budget
    if record.search.per == "trial":
        most = max(point["work"] for point in points)
    base = plot(points).encode(
        x=alt.X(
            "work:Q",
            title="work spent (full trainings by the cheapest method)",
            scale=alt.Scale(domain=[0, most], nice=False),
        ),
        y=_validation_axis(record),
        color=method_colour(names, styles),
        tooltip=["method:N", "work:Q", "score:Q", "trials:Q"],
    )
    line = base.mark_line(interpolate="step-after", strokeWidth=2)
    dots = base.mark_point(size=45, filled=True).encode(method_shape(names, styles))
    return alt.layer(line, dots).properties(width=WIDTH, height=HEIGHT)


def _setting_points(record: TuningRecord, setting: str) -> list[dict[str, Any]]:
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


def _setting_chart(record: TuningRecord, setting: str, points: list[dict[str, Any]]) -> Any:
    """Scores by the value of one setting."""
    search = record.search
    ranges = [r for m in search.methods for r in record.ranges(m) if r.setting == setting]
    names = list(search.methods)
    styles = Styles.of(names)
    if any(each.choices for each in ranges):
        x = alt.X("value:N", title=setting)
    else:
        ends = [min(each.low for each in ranges), max(each.high for each in ranges)]
        log = all(each.log for each in ranges)
        scale = alt.Scale(type="log" if log else "linear", domain=ends, nice=False)
        x = alt.X("value:Q", title=setting, scale=scale, axis=alt.Axis(format="~g"))
    return (
        plot(points)
        .mark_point(size=60)
        .encode(
            x=x,
            y=_validation_axis(record, _clipped(record, [point["score"] for point in points])),
            color=method_colour(names, styles),
            shape=method_shape(names, styles),
            fillOpacity=alt.condition("datum.whole", alt.value(1), alt.value(0)),
            fill=method_colour(names, styles),
            opacity=alt.condition("datum.whole", alt.value(1), alt.value(0.5)),
            tooltip=["method:N", "trial:Q", "value:N", "score:Q", "rounds:Q"],
        )
        .properties(width=WIDTH, height=HEIGHT)
    )


def _clipped(record: TuningRecord, scores: list[float]) -> list[float] | None:
    """Where to clip an axis of scores: as far beyond the median as it is from the best, twice."""
    sign = 1 if record.search.higher_is_better else -1
    best, middle = sign * max(sign * score for score in scores), median(scores)
    worst = middle + 2 * (middle - best)
    if middle == best or all(sign * score >= sign * worst for score in scores):
        return None
    return sorted([best, worst])


def _validation_axis(record: TuningRecord, limits: list[float] | None = None) -> Any:
    measure = record.search.measure
    axis = score_axis(alt.Y, "score", f"validation {measure}", measure == "accuracy")
    return axis if limits is None else axis.scale(domain=limits, clamp=True)
