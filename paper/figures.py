"""The figures of docs/results.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import vl_convert

from nufed.lab.report.style import GREY, PALETTE, spread_labels
from paper.stages import ALPHAS, DELTAS, FOUR, NUS, WHERE, alpha_stage
from paper.summary import Summary, Values, distances, summary

NAMES = {
    "fedavg": "FedAvg",
    "per-fedavg-fo": "Per-FedAvg (FO)",
    "per-fedavg-hf": "Per-FedAvg (HF)",
    "gmeta-fo": "gMeta (FO)",
    "gmeta-hf": "gMeta (HF)",
    "gmeta-exact": "gMeta (exact)",
}
NULLS = {
    "majority": "majority class",
    "local": "trained alone",
    "untrained": "untrained",
}
NULL_STEPS = {"majority": 0, "local": 0, "untrained": 3}  # only the untrained is fine-tuned
MEASURES = {
    "score": "test accuracy",
    "balanced": "balanced accuracy",
    "minority": "accuracy on minority classes",
}
FIGURES = ("fig1", "fig2", "fig3", "fig4", "fair-fig1", "fair-fig2", "fair-standardised")
WIDTH, HEIGHT = 290, 260

Line = tuple[str, str, int]  # label, method, fine-tuning steps


def name(method: str) -> str:
    """The name of a method in figures and tables, with its batch size if it has one."""
    stem, _, size = method.rpartition("-")
    return f"{NAMES[stem]}, D = {size}" if stem in NAMES and size.isdigit() else NAMES[method]


def save(chart: Any, file: str) -> Path:
    """Write a chart as SVG."""
    path = WHERE.results / f"{file}.svg"
    styled = (
        chart.configure_axis(labelFontSize=12, titleFontSize=13, gridColor="#eeeeee")
        .configure_legend(labelFontSize=12, titleFontSize=12, labelLimit=260, symbolStrokeWidth=2)
        .configure_title(fontSize=13, fontWeight="normal", anchor="start")
        .configure_view(stroke="#cccccc")
    )
    path.write_text(vl_convert.vegalite_to_svg(styled.to_json()), "utf-8")
    return path


def rounds_figure(run: Summary, lines: Sequence[Line], nulls: Summary | None = None) -> Any:
    """Accuracy, balanced accuracy and accuracy on minority classes by round."""
    panels = []
    for measure in MEASURES:
        points = [
            _point(label, round, values)
            for label, method, step in lines
            for round, values in zip(
                run.rounds(method), _level_seeds(run, method, step, measure).T, strict=True
            )
        ]
        dashed = _levels(nulls or run, measure)
        panels.append(_panel(points, dashed, "communication round", MEASURES[measure]))
    return _side_by_side(panels)


def _level_seeds(run: Summary, method: str, step: int, measure: str) -> Values:
    """A curve by seed and round, corrected for the difficulty of each seed's split.

    The accuracy of the majority class of a seed is replaced by its mean over seeds.
    """
    curve = run.curve(method, step, measure)
    if measure == "minority":
        return curve
    easy = run.agents("majority", 0, measure).mean(axis=1)[: len(curve)]
    return curve - easy[:, None] + easy.mean()


def _levels(run: Summary, measure: str, group: str = "seen") -> dict[str, float]:
    """The null baselines' means."""
    found = {}
    for null, label in NULLS.items():
        if null in run.data["baselines"]:
            step = NULL_STEPS[null]
            values = (
                run.minority(null, step, group)
                if measure == "minority"
                else run.agents(null, step, measure, group)
            )
            found[label] = float(np.nanmean(values))
    return found


def compute_figure(run: Summary) -> Any:
    """Accuracy by gradient evaluations, up to FedAvg's budget; also on minority classes."""
    panels = []
    for measure in ("score", "minority"):
        points = [
            _point(NAMES[method], round * run.compute(method) / 1000, values)
            for method in FOUR
            for round, values in zip(
                run.rounds(method), _level_seeds(run, method, 3, measure).T, strict=True
            )
            if round * run.compute(method) <= run.budget
        ]
        dashed = _levels(run, measure)
        title = "gradient evaluations, thousands"
        panels.append(_panel(points, dashed, title, MEASURES[measure], symbols=False))
    return _side_by_side(panels)


def alpha_figure(runs: dict[float, Summary]) -> Any:
    """Accuracy above the majority class over α_d, on agents seen in training and on others."""
    panels = []
    order = [_alpha(alpha) for alpha in ALPHAS if alpha in runs]
    for group in ("seen", "unseen"):
        rows, dashed = [], []
        for alpha, run in runs.items():
            majority = run.agents("majority", 0, group=group).mean(axis=1)
            for method in FOUR:
                values = run.agents(method, 3, group=group).mean(axis=1) - majority
                rows.append(_point(NAMES[method], 0, values) | {"x": _alpha(alpha)})
            for label, level in _levels(run, "score", group).items():
                above = level - float(majority.mean())
                dashed.append({"method": label, "x": _alpha(alpha), "mean": above})
        x = alt.X("x:O", sort=order, title="α_d (heterogeneity falls to the right)")
        x = x.axis(labelAngle=0)
        title = f"accuracy above majority class, agents {group}"
        panels.append(_layers(rows, dashed, x, title))
    return _side_by_side(panels)


def _alpha(alpha: float) -> str:
    return "∞ (IID)" if np.isinf(alpha) else f"{alpha:g}"


def delta_figure(run: Summary) -> Any:
    """The distance of the Hessian-free model from the exact one, and its accuracy, by δ."""
    order = ["auto", *reversed(DELTAS)]
    far = [
        {"x": method.removeprefix("hf-"), "mean": float(np.mean(values)), "method": "Hessian-free"}
        for method, values in distances().items()
    ]
    x = alt.X("x:O", sort=order, title="finite-difference step δ").axis(labelAngle=0)
    title = "distance from the exact model / its movement"
    left = (
        alt.Chart(alt.Data(values=far))
        .mark_line(point=alt.OverlayMarkDef(size=60), color=PALETTE[0])
        .encode(x, alt.Y("mean:Q", title=title, scale=alt.Scale(type="log")))
        .properties(width=WIDTH, height=HEIGHT)
    )
    rows, dashed = [], []
    for delta in order:
        for label, measure in (("accuracy", "score"), ("balanced", "balanced")):
            values = run.agents(f"hf-{delta}", 3, measure).mean(axis=1)
            rows.append(_point(label, 0, values) | {"x": delta})
    for delta in order:
        for label, value in (
            ("exact, accuracy", run.agents("exact", 3).mean()),
            ("exact, balanced", run.agents("exact", 3, "balanced").mean()),
        ):
            dashed.append({"method": label, "x": delta, "mean": float(value)})
    return alt.hconcat(left, _layers(rows, dashed, x, "after 3 steps")).resolve_scale(
        color="independent"
    )


def heat_figure(runs: Sequence[tuple[str, Summary]]) -> Any:
    """ν in training against ν in evaluation; the best training of each evaluation is framed."""
    panels = []
    for title, run in runs:
        rows = []
        for steps in NUS:
            values = {nu: float(run.agents(f"nu-{nu}", steps).mean()) for nu in NUS}
            best = max(values, key=values.__getitem__)
            rows += [
                {"train": nu, "eval": steps, "accuracy": value, "best": nu == best}
                for nu, value in values.items()
            ]
        base = alt.Chart(alt.Data(values=rows)).encode(
            alt.X("eval:O", title="fine-tuning steps in evaluation").axis(labelAngle=0),
            alt.Y("train:O", title="ν in training", sort="descending"),
        )
        low = float(np.quantile([r["accuracy"] for r in rows if r["eval"]], 0.05))
        high = max(r["accuracy"] for r in rows)
        scale = alt.Scale(domain=[low, high], clamp=True, scheme="viridis")
        dark = f"datum.accuracy < {(low + high) / 2}"
        panels.append(
            alt.layer(
                base.mark_rect().encode(
                    alt.Color("accuracy:Q", scale=scale, legend=alt.Legend(format="%", title=None))
                ),
                base.transform_filter("datum.best").mark_rect(
                    fill=None, stroke="#D55E00", strokeWidth=3
                ),
                base.mark_text(fontSize=12).encode(
                    alt.Text("accuracy:Q", format=".1%"),
                    color=alt.condition(dark, alt.value("white"), alt.value("black")),
                ),
            ).properties(width=360, height=280, title=title)
        )
    return alt.hconcat(*panels).resolve_scale(color="independent")


def _point(label: str, x: float, values: Values) -> dict[str, Any]:
    low, mean, high = np.nanmin(values), np.nanmean(values), np.nanmax(values)
    return {"method": label, "x": x, "mean": float(mean), "low": float(low), "high": float(high)}


def _panel(
    points: list[dict[str, Any]],
    levels: dict[str, float],
    x_title: str,
    y_title: str,
    symbols: bool = True,
) -> Any:
    ends = (0, max(point["x"] for point in points))
    dashed = [{"method": n, "x": x, "mean": level} for n, level in levels.items() for x in ends]
    x = alt.X("x:Q", title=x_title, scale=alt.Scale(nice=False))
    return _layers(points, dashed, x, y_title, symbols=symbols)


def _layers(
    points: list[dict[str, Any]],
    dashed: list[dict[str, Any]],
    x: Any,
    y_title: str,
    symbols: bool = True,
) -> Any:
    """Lines with bands over seeds, and the null baselines dashed, with their names at the end."""
    methods = list(dict.fromkeys(point["method"] for point in points))
    legend = alt.Legend(
        title=None, orient="top", columns=6, symbolType="stroke", symbolOpacity=1, symbolSize=220
    )
    scale = alt.Scale(domain=methods, range=PALETTE[: len(methods)])
    colour = alt.Color("method:N", scale=scale, legend=legend)
    y = alt.Y("mean:Q", title=y_title, scale=alt.Scale(zero=False), axis=alt.Axis(format="%"))
    lines = alt.Chart(alt.Data(values=points)).encode(x, color=colour)
    ends = {point["method"]: point for point in dashed}  # the last of each
    names = alt.Chart(alt.Data(values=spread_labels(list(ends.values()), points + dashed)))
    layers = [
        alt.Chart(alt.Data(values=dashed))
        .mark_line(strokeDash=[5, 4], color=GREY)
        .encode(x, y, detail="method:N"),
        names.mark_text(align="left", dx=6, color=GREY, fontSize=11).encode(x, y, text="method:N"),
        lines.mark_area(opacity=0.12).encode(alt.Y("low:Q"), alt.Y2("high:Q")),
        lines.mark_line(strokeWidth=2).encode(y),
    ]
    if symbols:  # of different shapes, to distinguish coinciding lines
        few = alt.Chart(alt.Data(values=_some(points, methods))).encode(x, y, color=colour)
        shape = alt.Shape("method:N", scale=alt.Scale(domain=methods), legend=None)
        layers.append(few.mark_point(size=45, strokeWidth=1.5).encode(shape=shape))
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)


def _some(points: list[dict[str, Any]], methods: list[str]) -> list[dict[str, Any]]:
    """The points to draw symbols at: every eighth of long lines, offset by method."""
    some = []
    for i, method in enumerate(methods):
        own = [point for point in points if point["method"] == method]
        some += own[i % 8 :: 8] if len(own) > 20 else own
    return some


def _side_by_side(panels: list[Any]) -> Any:
    return alt.hconcat(*panels, spacing=30)


def all_figures() -> dict[str, Path]:
    """Draw every figure whose runs exist; paths by figure."""
    drawn: dict[str, Path] = {}
    one = summary("fig1")
    for figure in FIGURES:
        if run := summary(figure):
            lines = [
                (_line_name(method, steps, figure), method, steps)
                for method in run.methods
                for steps in run.data["methods"][method]["steps"]
            ]
            nulls = one if figure in ("fig3", "fig4") else run
            drawn[figure] = save(rounds_figure(run, lines, nulls), figure)
    if run := summary("delta"):
        drawn["delta"] = save(delta_figure(run), "delta")
    runs = {a: r for a in ALPHAS if (r := summary(alpha_stage(a)[0]))}
    if runs:
        drawn["alpha"] = save(alpha_figure(runs), "alpha")
    maps = [
        (title, run)
        for title, stage in (
            ("the paper's setting, exact, α chosen", "steps"),
            ("α_d = 0.1, tuned step sizes, first-order, α chosen", "steps-tuned"),
        )
        if (run := summary(stage))
    ]
    if maps:
        drawn["heat"] = save(heat_figure(maps), "heat")
    if run := summary("fair-fig1"):
        drawn["compute"] = save(compute_figure(run), "compute")
    return drawn


def _line_name(method: str, steps: int, figure: str) -> str:
    if figure not in ("fig3", "fig4"):
        return name(method)
    return f"{name(method)}, {steps} step{'s'[: steps > 1]}"
