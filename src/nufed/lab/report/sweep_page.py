"""The page of a sweep: scores by every swept key, heat maps for pairs of keys, and all runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from nufed.lab.config.sweep_grid import value_text
from nufed.lab.report.charts import KeyedScore, KeyValue, score_by_key, score_by_two_keys
from nufed.lab.report.figures import draw, spec_of
from nufed.lab.report.page import save_page, template
from nufed.lab.report.style import Styles
from nufed.lab.report.sweep_tables import (
    best_of,
    labels,
    sweep_groups,
    sweep_headline,
    sweep_notes,
    sweep_table,
)
from nufed.lab.report.tables import Table
from nufed.lab.runs.results import MIN_VALUES, Estimate, Line, over_agents
from nufed.lab.runs.sweep_record import Sweep


def build_sweep_page(sweep: Sweep, *, figures: bool = True) -> Path:
    """Write ``report.html`` and ``figures/`` of a sweep into its directory.

    Without ``figures`` no SVG and PNG files are drawn.
    """
    charts = list(sweep_charts(sweep))
    specs = {name: spec_of(chart) for name, _, chart in charts}
    drawn = draw(specs if figures else {}, javascript=True)
    page = template("sweep.html.j2").render(
        title=sweep.path.name,
        headline=sweep_headline(sweep),
        notes=sweep_notes(sweep),
        charts=[(name, caption) for name, caption, _ in charts if name.startswith("by-key")],
        maps=[(name, caption) for name, caption, _ in charts if name.startswith("map")],
        results=[
            (group, sweep_table(sweep, group), [best_of(sweep, n, group) for n in sweep.values])
            for group in sweep_groups(sweep)
        ],
        runs=sweep.runs,
        keys=Table(
            ["key", "values"],
            [[key, ", ".join(map(value_text, values))] for key, values in sweep.keys.items()],
            [False] * len(sweep.keys),
        ),
        base_lines=sweep.base.to_toml().splitlines(),
        failures=sweep.failures,
        specs=specs,
        drawn=drawn,
    )
    return save_page(
        page.encode("utf-8", "backslashreplace"), drawn, sweep.path, "nufed sweep --resume"
    )


def sweep_charts(sweep: Sweep) -> Iterator[tuple[str, str, Any]]:
    """Every chart of the page as (file name, caption, chart)."""
    swept = [key for key, values in sweep.keys.items() if len(values) > 1]
    runs = list(sweep.runs.values())
    for group in sweep_groups(sweep):
        scored = next(run for run in runs if run.rows())
        score = f"{scored.config.eval_on} {scored.measure.name}"
        style: dict[str, Any] = {"title": score, "percent": scored.measure.name == "accuracy"}
        agents = f"agents {group} in training, last round"
        for number, key in enumerate(swept, start=1):
            others = ", ".join(other for other in swept if other != key)
            mean = f", mean over the values of {others}" if others else ""
            caption = (
                f"{score.capitalize()} of personal models by {key}{mean}; {agents}. Bars: 95 % "
                "confidence intervals of the mean; dashed: null baselines."
            )
            scores = marginal_scores(sweep, group, key)
            styles = Styles.of(labels(sweep, "method"))
            yield (
                f"by-key-{number}-{group}",
                caption,
                score_by_key(scores, key, styles=styles, **style),
            )
        pairs = list(combinations(swept, 2))
        methods = labels(sweep, "method")
        for pair, (down, across) in enumerate(pairs, start=1):
            for number, method in enumerate(methods, start=1):
                scores = [s for s in keyed_scores(sweep, group) if s.method == method]
                caption = (
                    f"{score.capitalize()} of {method}'s personal models by {across} and {down}; "
                    f"{agents}."
                )
                chart = score_by_two_keys(scores, across, down, **style)
                yield f"map-{pair}-{number}-{group}", caption, chart


def keyed_scores(sweep: Sweep, group: str) -> list[KeyedScore]:
    """The score of every method and null baseline in every run, with the values of its keys."""
    return [
        KeyedScore(
            {key: _value(value) for key, value in sweep.values[name].items()},
            row.name,
            row.personal.mean,
            row.personal.half_width,
            row.kind == "baseline",
        )
        for name, run in sweep.runs.items()
        for row in run.rows()
        if row.group == group
    ]


def marginal_scores(sweep: Sweep, group: str, key: str) -> list[KeyedScore]:
    """Scores by the values of one key, averaged over those of the others.

    The interval is that over seeds, each averaged over the same runs; with fewer than three seeds
    over agents.
    """
    if len(sweep.runs) == len(sweep.keys[key]):
        return keyed_scores(sweep, group)
    found: dict[tuple[str, KeyValue, bool], list[dict[int, dict[int, float]]]] = {}
    for name, run in sweep.runs.items():
        for line in run.lines():
            own = _by_seed_and_agent(line, group)
            if own:
                place = (line.label, _value(sweep.values[name][key]), line.kind == "baseline")
                found.setdefault(place, []).append(own)
    scores = []
    for (method, value, baseline), runs in found.items():
        common = sorted(set.intersection(*(set(own) for own in runs)))
        if not common:
            continue
        by_seed = [
            float(np.mean([np.mean(list(own[seed].values())) for own in runs])) for seed in common
        ]
        mean = Estimate.of(by_seed)
        half = mean.half_width
        if len(by_seed) < MIN_VALUES:
            half = over_agents([own[seed] for own in runs for seed in common])
        scores.append(KeyedScore({key: value}, method, mean.mean, half, baseline))
    return scores


def _by_seed_and_agent(line: Line, group: str) -> dict[int, dict[int, float]]:
    return {
        seed: {s.agent: s.score[line.steps] for s in scores}
        for seed, scores in zip(line.seeds, line.scores(group), strict=True)
        if scores
    }


def _value(value: Any) -> KeyValue:
    return value if isinstance(value, str | int | float | bool) else value_text(value)
