"""The results of a sweep as one table: ``results.csv`` and ``results.parquet``."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from nufed.config.sweep_grid import value_text
from nufed.data.csv_file import to_cell
from nufed.files import write_durably
from nufed.runs.json_files import finite
from nufed.runs.sweep_record import Sweep


def write_results(sweep: Sweep) -> str | None:
    """Write ``results.csv`` and ``results.parquet``; return why the latter was left out, if so.

    Both have the columns of :meth:`nufed.Sweep.records`; undefined scores are empty.
    """
    records = [finite(record) for record in sweep.records()]
    columns = list(records[0]) if records else ["run", *sweep.keys]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([_cell(record[column]) for column in columns] for record in records)
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


def _cell(value: Any) -> str:
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
