"""What a sweep found: its headline and table, for the terminal, too, and its page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from markupsafe import Markup

from nufed.errors import visible
from nufed.lab.analysis.comparison import keyed_scores, marginal_scores
from nufed.lab.config.sweep_grid import in_words, value_text
from nufed.lab.report.figures import Chart
from nufed.lab.report.page import Charts, Code, Folded, Page, Section, Text, Warned, caption, note
from nufed.lab.report.tables import Table, all_groups, listed, number_format
from nufed.lab.runs import Row, Run
from nufed.lab.runs.sweep_record import Sweep


def build_sweep_page(sweep: Sweep, *, figures: bool = True) -> Path:
    """Write ``report.html`` and ``figures/`` of a sweep into its directory.

    Without ``figures`` no SVG and PNG files are drawn.
    """
    return _sweep_page(sweep).save(sweep.path, "nufed sweep --resume", figures=figures)


def labels(sweep: Sweep, kind: str) -> list[str]:
    """The methods or null baselines of all runs, in their order."""
    lines = (line for run in sweep.runs.values() for line in run.lines() if line.kind == kind)
    return list(dict.fromkeys(line.label for line in lines))


def sweep_table(sweep: Sweep, group: str, *, narrow: bool = False) -> Table:
    """The score of personal models by run and method, with the half-width of its interval.

    ``narrow`` omits intervals, null baselines and the names of runs, to fit into a terminal.
    """
    names = [*labels(sweep, "method"), *([] if narrow else labels(sweep, "baseline"))]
    rows = []
    for name, values in sweep.values.items():
        shown = _by_label(sweep.runs.get(name), group)
        cells = [_cell(sweep.runs[name], shown[n], narrow) if n in shown else "–" for n in names]
        rows.append([*([] if narrow else [name]), *map(value_text, values.values()), *cells])
    keys = [short_key(key, sweep.keys) for key in sweep.keys] if narrow else list(sweep.keys)
    headings = [*([] if narrow else ["run"]), *keys, *names]
    return Table(headings, rows)


def short_key(key: str, keys: Mapping[str, Any]) -> str:
    """The last part of a key, unless another key has the same."""
    last = key.rpartition(".")[2]
    return last if [k.rpartition(".")[2] for k in keys].count(last) == 1 else key


def best_of(sweep: Sweep, name: str, group: str) -> str | None:
    """The method with the best score in a run."""
    rows = list(_by_label(sweep.runs.get(name), group).values())
    return next((r.name for r in rows if r.kind == "method" and _finite(r)), None)


def sweep_headline(sweep: Sweep) -> str:
    """What was measured, and the best result."""
    runs = [run for run in sweep.runs.values() if any(row.kind == "method" for row in run.rows())]
    about = f"{len(sweep.values)} runs over {listed(list(sweep.keys))}"
    if not runs:
        return f"{about}. No method could be trained."
    group = "unseen" if "unseen" in all_groups(list(sweep.runs.values())) else "seen"
    measure, config = runs[0].measure, runs[0].config
    rows = [
        (row, name)
        for name, run in sweep.runs.items()
        for row in run.rows()
        if row.kind == "method" and row.group == group and _finite(row)
    ]
    text = (
        f"{about}, {len(config.seeds)} seed{'s' * (len(config.seeds) > 1)} each: "
        f"{config.eval_on} {measure.words} of agents' personal models, last round, agents {group} "
        "in training."
    )
    if not rows:
        return text
    sign = 1 if measure.higher_is_better else -1
    best, name = max(rows, key=lambda scored: sign * scored[0].personal.mean)
    show = number_format(runs[0])
    return f"{text} Best: {best.name} with {in_words(sweep.values[name])}, {_estimate(best, show)}."


def sweep_notes(sweep: Sweep) -> list[str]:
    """Caveats about comparing the runs."""
    runs = [run for run in sweep.runs.values() if run.rows()]
    notes = [
        "The best of many results is chosen by the scores shown, so its score is optimistic: to "
        "choose settings, score on validation samples (eval_on) and confirm with other seeds."
    ]
    steps = sorted({run.config.steps_shown for run in runs})
    if len(steps) > 1:
        notes.append(
            f"Personal models are fine-tuned for {listed(steps)} steps, by run: "
            "eval_steps is the largest adapt_steps of a run unless it is set; set it, for example "
            f"eval_steps={steps[-1]}, to score all runs after the same number of steps."
        )
    return notes


def _by_label(run: Run | None, group: str) -> dict[str, Row]:
    return {} if run is None else {row.name: row for row in run.rows() if row.group == group}


def _cell(run: Run, row: Row, narrow: bool) -> str:
    show = number_format(run)
    return show(row.personal.mean) if narrow else _estimate(row, show)


def _estimate(row: Row, show: Callable[[float], str]) -> str:
    half = row.personal.half_width
    return show(row.personal.mean) + ("" if half is None else f" ± {show(half)}")


def _finite(row: Row) -> bool:
    return math.isfinite(row.personal.mean)


def _sweep_page(sweep: Sweep) -> Page:
    charts = list(sweep_charts(sweep))
    groups = all_groups(list(sweep.runs.values()))
    tables = [Section(f"Agents {g} in training", [_linked_table(sweep, g)]) for g in groups]
    keys = [[key, ", ".join(map(value_text, values))] for key, values in sweep.keys.items()]
    shared = Code(sweep.base.to_toml().splitlines())
    return Page(
        sweep.path.name,
        [Text(sweep_headline(sweep), "finding")],
        [
            Section(
                "",
                [
                    Warned("Could not be trained, and left out:", sweep.failures),
                    Charts([chart for chart in charts if chart[0].startswith("by-key")]),
                ],
            ),
            Section("All runs", [*tables, note("sweep"), *sweep_notes(sweep)] if tables else []),
            Section("By two keys", [Charts([c for c in charts if c[0].startswith("map")])]),
            Section(
                "Settings",
                [
                    Table(["key", "values"], keys, prose=True),
                    Folded("The configuration that all runs share", [shared]),
                ],
            ),
        ],
    )


def _linked_table(sweep: Sweep, group: str) -> Table:
    """The table of runs, with links to their reports and the best method of each in bold."""
    table = sweep_table(sweep, group)
    link = Markup('<a href="runs/{0}/report.html">{0}</a>')
    bold = Markup('<b class="best">{}</b>')
    rows = []
    for name, *cells in table.rows:
        best = best_of(sweep, name, group)
        marked = [
            bold.format(cell) if heading == best else cell
            for heading, cell in zip(table.headings[1:], cells, strict=True)
        ]
        rows.append([link.format(visible(name)) if name in sweep.runs else name, *marked])
    return replace(table, rows=rows)


def sweep_charts(sweep: Sweep) -> Iterator[Chart]:
    """Every chart of the page: by each swept key, and by every pair of keys for each method."""
    from nufed.lab.report.charts import score_by_key, score_by_two_keys  # altair is slow to import
    from nufed.lab.report.style import Styles

    methods = labels(sweep, "method")
    styles = Styles.of(methods)
    swept = [key for key, values in sweep.keys.items() if len(values) > 1]
    runs = list(sweep.runs.values())
    for group in all_groups(list(sweep.runs.values())):
        scored = next(run for run in runs if run.rows())
        score = f"{scored.config.eval_on} {scored.measure.words}"
        axis: dict[str, Any] = {"title": score, "percent": scored.measure.name == "accuracy"}
        capital = score.capitalize()
        for number, key in enumerate(swept, start=1):
            others = ", ".join(other for other in swept if other != key)
            mean = f", mean over the values of {others}" if others else ""
            words = caption("sweep", score=capital, key=key, mean=mean, group=group)
            scores = marginal_scores(sweep, group, key)
            yield (
                f"by-key-{number}-{group}",
                words,
                score_by_key(scores, key, styles=styles, **axis),
            )
        for pair, (down, across) in enumerate(combinations(swept, 2), start=1):
            for number, method in enumerate(methods, start=1):
                scores = [s for s in keyed_scores(sweep, group) if s.method == method]
                both = {"across": across, "down": down}
                words = caption("map", score=capital, method=method, group=group, **both)
                chart = score_by_two_keys(scores, across, down, **axis)
                yield f"map-{pair}-{number}-{group}", words, chart
