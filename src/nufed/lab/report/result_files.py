"""Results as files: CSV of runs (``nufed report --csv``), CSV and Parquet of a sweep."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

from nufed.lab.config.sweep_grid import value_text
from nufed.lab.files import write_durably
from nufed.lab.readers.files import to_cell
from nufed.lab.report.tables import run_name
from nufed.lab.runs import Estimate, Row, Run
from nufed.lab.runs.json_files import finite
from nufed.lab.runs.results import Paired
from nufed.lab.runs.sweep_record import Sweep

ESTIMATES = {
    "global": "shared",
    "personal": "personal",
    "as_trained": "as_trained",
    "balanced": "balanced",
    "minority": "minority",
    "above_majority": "above_majority",
}
NUMBERS = ("weighted_mean", "std", "worst_tenth", "harmed", "loss", "over_samples")


def results_csv(runs: Sequence[Run]) -> str:
    """A line for every method and null baseline of each group, with paired differences.

    Numbers have all their digits; undefined ones are empty. ``…_half_width`` is that of the 95 %
    confidence interval of the column before it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    estimates = [*ESTIMATES, "minus_local", "minus_best"]
    pairs = [column for name in estimates for column in (name, f"{name}_half_width")]
    writer.writerow(["run", "group", "name", "kind", "measure", *pairs, *NUMBERS])
    for run in runs:
        differences = run.paired()
        for row in run.rows():
            names = [run_name(run, runs), row.group, row.name, row.kind, run.measure.name]
            writer.writerow([*map(to_cell, names), *map(_number, _numbers(row, differences))])
    return text.getvalue()


def _numbers(row: Row, differences: Sequence[Paired]) -> Iterator[float | None]:
    """The numbers of a line."""
    for field in ESTIMATES.values():
        estimate: Estimate = getattr(row, field)
        yield from (estimate.mean, estimate.half_width)
    pairs = [p for p in differences if (p.group, p.name) == (row.group, row.name)]
    nulls = ("local", "majority", "centroid", "untrained")
    for wanted in (
        [p for p in pairs if p.against == "local"],
        [p for p in pairs if p.against not in nulls],
    ):
        yield from (wanted[0].mean, wanted[0].half_width) if wanted else (None, None)
    yield from (getattr(row, field) for field in NUMBERS)


def _number(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else repr(value)


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
