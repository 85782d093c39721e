"""The charts of a report: interactive on the page, and as SVG and PNG files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from math import nan
from typing import Any

import altair as alt
import numpy as np

from nufed.report.tables import all_groups, label, run_name
from nufed.runs import Run
from nufed.runs.results import Line

# Okabe and Ito's colour-blind-safe palette
PALETTE = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D31", "#000000"]
GREY = "#777777"
SHAPES = ["circle", "square", "triangle-up", "cross", "diamond", "triangle-right", "triangle-down",
          "triangle-left"]  # fmt: skip
WIDTH, HEIGHT = 560, 320
DOTTED = [2, 3]  # strokes of a global model's line
MAX_AGENTS = 100  # in the chart of a split
LEGEND_COLUMNS = 6  # methods in a row of a legend
MAX_TICKS = 12  # up to so many steps or rounds, each has a tick


def all_charts(runs: Sequence[Run]) -> Iterator[tuple[str, str, Any]]:
    """Every chart of a report as (file name, caption, chart)."""
    steps = _steps(runs)
    for group in all_groups(runs):
        agents = f"agents {group} in training"
        yield (
            f"rounds-{group}",
            f"{_score(runs)} of personal models after {steps} fine-tuning steps by round, "
            f"{agents}, with the step size of fine-tuning {_sized_by_round(runs)}. Lines: mean "
            "over agents and seeds; bands: range over seeds; dotted: the method's global model; "
            "dashed: null baselines, last round.",
            rounds_chart(runs, group),
        )
    yield (
        "steps",
        f"{_score(runs)} of personal models by number of fine-tuning steps, last round, agents "
        "seen in training. "
        "Bands: range over seeds; dashed: null baselines.",
        steps_chart(runs),
    )
    yield (
        "agents",
        f"{_score(runs)} of individual agents' personal models after {steps} fine-tuning steps, "
        "last round, agents seen in training, all seeds. Boxes: quartiles; whiskers: range; white "
        "ticks: medians.",
        agents_chart(runs),
    )
    for run in runs:
        if next(iter(run.splits.values())).classes:
            name = "split" if len(runs) == 1 else f"split-{runs.index(run) + 1}"
            first = run.config.seeds[0]
            of = run_name(run, runs)
            caption = f"Samples per agent{_first(run)} and class, {of}, seed {first}."
            yield name, caption, split_chart(run)


def evaluation_by_round(run: Run) -> str:
    """The key of a round's line that learning curves are drawn from."""
    by_round = run.config.eval_lr == "chosen_by_round" and run.step_sizes_chosen
    return "evaluation_chosen" if by_round else "evaluation"


def _sized_by_round(runs: Sequence[Run]) -> str:
    keys = {evaluation_by_round(run) for run in runs}
    words = {"evaluation": "as trained", "evaluation_chosen": "chosen in every round"}
    return " or ".join(words[key] for key in sorted(keys))


def rounds_chart(runs: Sequence[Run], group: str) -> Any:
    """Score by round, of personal models and of the global one."""
    points = []
    shared: dict[tuple[str, str], list[dict[str, Any]]] = {}  # once for a method with several lines
    for run, name, line in _lines(runs, "method"):
        if group not in run.groups:
            continue
        key = evaluation_by_round(run)
        seeds = [[m for m in t.metrics if group in getattr(m, key)] for t in line.seeds.values()]
        own = []
        for same_round in zip(*seeds, strict=False):  # until one stopped early
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
    return _curves(runs, points, "round", "communication round", group, True, dotted)


def steps_chart(runs: Sequence[Run]) -> Any:
    """Score by number of fine-tuning steps."""
    points = []
    for run in runs:
        for method, part in run.methods.items():
            for step in range(run.config.steps_evaluated + 1):
                scores = [_seen_mean(t.final, step) for t in part.values()]
                points.append(_point(label(run, method, runs), "step", step, scores))
    return _curves(runs, points, "step", "fine-tuning steps", "seen", False)


def agents_chart(runs: Sequence[Run]) -> Any:
    """The distribution of scores over agents."""
    rows = [
        {"method": name, "score": s.score[line.steps]}
        for _, name, line in _lines(runs)
        for scores in line.scores("seen")
        for s in scores
        if math.isfinite(s.score[line.steps])
    ]
    names = [name for _, name, _ in _lines(runs, "method")]
    nulls = [name for _, name, _ in _lines(runs, "baseline")]
    palette = [*colours(names), *[GREY] * len(nulls)]
    return (
        plot(rows)
        .mark_boxplot(extent="min-max", size=22)
        .encode(
            y=alt.Y("method:N", sort=[*names, *nulls], title=None),
            x=_score_axis(runs, alt.X),
            color=alt.Color(
                "method:N", scale=alt.Scale(domain=[*names, *nulls], range=palette), legend=None
            ),
        )
        .properties(width=WIDTH, height=34 * (len(names) + len(nulls)))
    )


def _first(run: Run) -> str:
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
    return (
        plot(rows)
        .mark_rect(stroke="#eeeeee")
        .encode(
            x=alt.X("agent:N", sort=list(agents), axis=alt.Axis(labelOverlap=True, labelAngle=0)),
            y=alt.Y("class:N", sort=list(classes), axis=alt.Axis(labelOverlap=True)),
            color=alt.Color(
                "samples:Q", scale=alt.Scale(range=["#ffffff", "#08519c"], interpolate="rgb")
            ),
            tooltip=["agent:N", "class:N", "samples:Q"],
        )
        .properties(width=max(WIDTH, 8 * len(agents)), height=max(180, min(600, 16 * len(classes))))
    )


def plot(rows: list[dict[str, Any]]) -> Any:
    """A chart of these rows."""
    return alt.Chart(alt.InlineData(values=rows))


def _curves(
    runs: Sequence[Run],
    points: list[dict[str, Any]],
    x: str,
    x_title: str,
    group: str,
    last_step: bool,
    shared: Sequence[dict[str, Any]] = (),
) -> Any:
    """Mean lines with bands over seeds, global models dotted, and the null baselines dashed."""
    names = list(dict.fromkeys(point["method"] for point in points))
    points = [p for p in points if all(math.isfinite(p[k]) for k in ("mean", "low", "high"))]
    colour = alt.Color(
        "method:N",
        scale=alt.Scale(domain=names, range=colours(names)),
        legend=alt.Legend(
            title=None, orient="top", symbolOpacity=1, symbolSize=80, columns=LEGEND_COLUMNS
        ),
    )
    shape = alt.Shape("method:N", scale=alt.Scale(domain=names, range=shapes(names)), legend=None)
    last = max((point[x] for point in points), default=0)
    # explicit ticks for few steps: Vega would place some in between
    ticks = {"values": list(range(last + 1))} if last <= MAX_TICKS else {"tickMinStep": 1}
    axis = alt.X(f"{x}:Q", title=x_title, axis=alt.Axis(format="d", **ticks))
    base = plot(points).encode(x=axis, color=colour)
    band = base.mark_area(opacity=0.15).encode(
        y=_score_axis(runs, alt.Y, "low"), y2=alt.Y2("high:Q")
    )
    line = base.mark_line(strokeWidth=2).encode(y=_score_axis(runs, alt.Y, "mean"))
    # open symbols of different shapes distinguish methods whose lines coincide
    point = base.mark_point(size=55, strokeWidth=1.5).encode(
        y=_score_axis(runs, alt.Y, "mean"),
        shape=shape,
        tooltip=["method:N", f"{x}:Q", "mean:Q", "low:Q", "high:Q"],
    )
    shared = [p for p in shared if math.isfinite(p["mean"])]
    dotted = plot(shared).encode(x=axis, y=_score_axis(runs, alt.Y, "mean"), color=colour)
    nulls = _null_lines(runs, group, x, last, last_step)
    dashed = plot(nulls).encode(x=axis, y=_score_axis(runs, alt.Y, "mean"), detail="method:N")
    ends = {line["method"]: line for line in nulls}  # the last point of each
    labels = spread_labels(list(ends.values()), points + nulls)
    named = plot(labels).encode(x=axis, y=_score_axis(runs, alt.Y, "mean"))
    return alt.layer(
        dashed.mark_line(strokeDash=[5, 4], color=GREY),
        *([dotted.mark_line(strokeDash=DOTTED, strokeWidth=1.5)] if shared else []),
        named.mark_text(align="left", dx=8, color=GREY, fontSize=11).encode(text="method:N"),
        band,
        line,
        point,
    ).properties(width=WIDTH, height=HEIGHT)


def _null_lines(
    runs: Sequence[Run], group: str, x: str, last: int, last_step: bool
) -> list[dict[str, Any]]:
    """The baselines' mean scores: constant over rounds, or by number of steps."""
    lines = []
    for run, name, line in _lines(runs, "baseline"):
        scores = [s for seed in line.scores(group) for s in seed]
        if not scores:
            continue
        for at in (0, last) if last_step else range(run.config.steps_evaluated + 1):
            value = float(np.mean([s.score[line.steps if last_step else at] for s in scores]))
            if math.isfinite(value):
                lines.append({"method": name, x: at, "mean": value})
    return lines


def spread_labels(ends: list[dict[str, Any]], points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Labels at the ends of lines, moved apart to avoid overlap."""
    values = [p[k] for p in points for k in ("mean", "low", "high") if math.isfinite(p.get(k, nan))]
    gap = 0.05 * (max(values) - min(values)) if values else 0.0
    spread: list[dict[str, Any]] = []
    for end in sorted(ends, key=lambda e: float(e["mean"])):
        lowest = spread[-1]["mean"] + gap if spread else end["mean"]
        spread.append({**end, "mean": max(end["mean"], lowest)})
    return spread


def _lines(runs: Sequence[Run], kind: str | None = None) -> list[tuple[Run, str, Line]]:
    """The lines of the runs' results, with names that are unique across runs."""
    return [
        (run, label(run, line.label, runs), line)
        for run in runs
        for line in run.lines()
        if kind in (None, line.kind)
    ]


def _point(name: str, x: str, at: int, scores: Sequence[float]) -> dict[str, Any]:
    mean = float(np.mean(scores))
    return {"method": name, x: at, "mean": mean, "low": min(scores), "high": max(scores)}


def _seen_mean(scores: Any, step: int) -> float:
    return float(np.mean([s.score[step] for s in scores if s.seen]))


def shapes(names: Sequence[str]) -> list[str]:
    """A shape per method, such that no two of up to 64 share both colour and shape."""
    return [SHAPES[(i + i // len(PALETTE)) % len(SHAPES)] for i in range(len(names))]


def colours(names: Sequence[str]) -> list[str]:
    """A colour for each name; repeated after eight."""
    return [PALETTE[i % len(PALETTE)] for i in range(len(names))]


def _score(runs: Sequence[Run]) -> str:
    return f"{runs[0].config.eval_on.capitalize()} {runs[0].measure.name}"


def _steps(runs: Sequence[Run]) -> str:
    return " or ".join(
        str(s) for s in sorted({line.steps for _, _, line in _lines(runs, "method")})
    )


def _score_axis(runs: Sequence[Run], channel: Any, field: str = "score") -> Any:
    percent = runs[0].measure.name == "accuracy"
    return channel(
        f"{field}:Q",
        title=_score(runs).lower(),
        scale=alt.Scale(zero=False),
        axis=alt.Axis(format="%" if percent else "~g"),
    )
