"""All charts of a report, and the learning curves: interactive on the page, and as SVG and PNG.

The chart of fitted curves: some agents' models before and after fine-tuning.

The chart of the results table: each method's personal models and its global model.

Charts of training itself: its loss and the norm of the server's update, by round.

Charts of individual agents: their scores, and their samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from math import nan
from typing import Any

import altair as alt
import numpy as np

from nufed.lab.report.by_key import keyed_scores, one_differing_key, score_by_key
from nufed.lab.report.style import (
    DASHED,
    DOTTED,
    GREY,
    HEIGHT,
    MAX_TICKS,
    ROW,
    WIDTH,
    Look,
    end_labels,
    fitted,
    interval,
    method_colour,
    method_shape,
    plot,
    score_axis,
    spread_labels,
    tooltips,
)
from nufed.lab.report.tables import all_groups, label, run_name
from nufed.lab.runs import Run
from nufed.lab.runs.records import MetricsLine
from nufed.lab.runs.results import Line, Trained
from nufed.lab.runs.warnings import jumps

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
