"""The results of a sweep as text: a table of runs by methods, a headline and notes.

The results of a sweep as one table: ``results.csv`` and ``results.parquet``.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nufed.files import write_durably
from nufed.lab.config.sweep_grid import in_words, value_text
from nufed.lab.readers.files import to_cell
from nufed.lab.report.tables import Table, number_format
from nufed.lab.runs import Row, Run
from nufed.lab.runs.json_files import finite
from nufed.lab.runs.sweep_record import Sweep


def write_results(sweep: Sweep) -> str | None:
    """Write ``results.csv`` and ``results.parquet``; return why the latter was left out, if so.

    Both have the columns of :meth:`nufed.Sweep.records`; undefined scores are empty.
    """
    records = [finite(record) for record in sweep.records()]
    columns = list(records[0]) if records else ["run", *sweep.keys]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([_csv_cell(record[column]) for column in columns] for record in records)
    write_durably(sweep.path / "results.csv", text.getvalue().encode("utf-8", "backslashreplace"))
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        return 'results.parquet was left out, it needs pyarrow: pip install "nufed[frames]"'
    table = pyarrow.table({name: _column([r[name] for r in records]) for name in columns})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    write_durably(sweep.path / "results.parquet", buffer.getvalue())
    return None


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    return to_cell(value) if isinstance(value, str) else value_text(value)


def _column(values: Sequence[Any]) -> list[Any]:
    """Values of one type: numbers, truth values or strings, else all of them as text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(kinds) <= 1 and kinds <= {bool, int, float, str}:
        return list(values)
    return [None if value is None else value_text(value) for value in values]


def sweep_groups(sweep: Sweep) -> list[str]:
    """The groups of agents that any run has scores of."""
    return max((r.groups for r in sweep.runs.values() if r.rows()), key=len, default=[])


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
        found = _by_label(sweep.runs.get(name), group)
        cells = [_cell(sweep.runs[name], found[n], narrow) if n in found else "–" for n in names]
        rows.append([*([] if narrow else [name]), *map(value_text, values.values()), *cells])
    keys = [short_key(key, sweep.keys) for key in sweep.keys] if narrow else list(sweep.keys)
    headings = [*([] if narrow else ["run"]), *keys, *names]
    return Table(headings, rows, [False] * len(rows))


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
    about = f"{len(sweep.values)} runs over {_and(list(sweep.keys))}"
    if not runs:
        return f"{about}. No method could be trained."
    group = "unseen" if "unseen" in sweep_groups(sweep) else "seen"
    measure, config = runs[0].measure, runs[0].config
    rows = [
        (row, name)
        for name, run in sweep.runs.items()
        for row in run.rows()
        if row.kind == "method" and row.group == group and _finite(row)
    ]
    text = (
        f"{about}, {len(config.seeds)} seed{'s' * (len(config.seeds) > 1)} each: "
        f"{config.eval_on} {measure.name} of agents' personal models, last round, agents {group} "
        "in training."
    )
    if not rows:
        return text
    sign = 1 if measure.higher_is_better else -1
    best, name = max(rows, key=lambda found: sign * found[0].personal.mean)
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
            f"Personal models are fine-tuned for {_and(list(map(str, steps)))} steps, by run: "
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


def _and(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
