"""The data source ``table``: a user's CSV or Parquet file with categories and missing values.

The source ``file`` takes numbers alone. This one keeps raw columns; a run prepares them with what
it learns from training rows (:mod:`nufed.data.tables`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nufed.data.samples import Samples, Table, as_samples
from nufed.data.tables import as_table
from nufed.errors import InputError, in_short, require, shown
from nufed.lab.readers.files import (
    LABEL,
    NUMBER_BYTES,
    TEXT_BYTES,
    TEXT_COPIES,
    Places,
    check_size,
    data_limit,
    from_cell,
    label_values,
    named_file,
    opened_parquet,
    parquet_values,
    places_of,
    read_bounded,
    separator_of,
    targets_of,
)

CELL_GROWTH = 32  # a cell takes up to 32 times its bytes in a CSV file


class Columns(NamedTuple):
    """The columns of a file by name, its labels and owners, if any."""

    columns: Mapping[str, Any]
    labels: Sequence[str] | np.ndarray[Any, Any] | None
    owners: Sequence[str] | None = None


def read_columns(
    path: Path, label: str = LABEL, labelled: bool = True, owner: str | None = None
) -> Columns:
    """The raw columns of a ``.csv`` with a header, or a ``.parquet``.

    Args:
        path: the file.
        label: the column of labels.
        labelled: whether labels are required; otherwise they are read if present.
        owner: the column of owners, if any.
    """
    with named_file(path):
        match path.suffix:
            case ".csv":
                content = read_bounded(path, data_limit() // CELL_GROWTH)
                data = _from_csv(content.decode("utf-8-sig"), label, owner, labelled)
            case ".parquet":
                content = read_bounded(path, data_limit())
                data = _from_parquet(content, label, owner, labelled)
            case _:
                raise InputError("a table with columns by name ends in .csv or .parquet")
        if not data.columns:
            raise InputError("it has no column beside the label and the owner: give some")
    return data


def _from_csv(text: str, label: str, owner: str | None, labelled: bool) -> Columns:
    separator = separator_of(text)
    reader = csv.reader(io.StringIO(text), delimiter=separator, strict=True)
    header = [name.strip() for name in next((row for row in reader if row), [])]
    places = places_of(header, label, owner, labelled) if header else Places(None, None)
    _check_names(header)
    same: dict[str, str] = {}  # equal cells share their text
    cells: list[list[str]] = [[] for _ in header]
    for row in (row for row in reader if row):
        if len(row) != len(header):
            raise InputError(
                f"line {reader.line_num} has {len(row)} values, the header has {len(header)}"
            )
        for column, cell in zip(cells, row, strict=True):
            column.append(same.setdefault(cell, cell))
    if not cells or not cells[0]:
        raise InputError("it is empty: give a line of column names, then one line per sample")
    labels = None if places.label is None else [from_cell(cell) for cell in cells[places.label]]
    if labelled and labels is not None and not all(labels):
        raise InputError(
            f"row {labels.index('')} (counted from 0) has an empty {shown(label)}: give every label"
        )
    owners = None if places.owner is None else [cell.strip() for cell in cells[places.owner]]
    features = {header[place]: cells[place] for place in places.features(len(header))}
    if separator != ",":
        features = {name: [_with_point(c) for c in column] for name, column in features.items()}
    return Columns(features, labels if labels and any(labels) else None, owners)


def _with_point(cell: str) -> str:
    """A number with a decimal comma as one with a point; other text as it is."""
    changed = cell.replace(",", ".")
    try:
        float(changed)
    except ValueError:
        return cell
    return changed


def _check_names(header: Sequence[str]) -> None:
    repeated = [name for name in header if header.count(name) > 1]
    if repeated:
        raise InputError(f"it has two columns {shown(repeated[0])}: give each a name of its own")


def _from_parquet(content: bytes, label: str, owner: str | None, labelled: bool) -> Columns:
    file = opened_parquet(content)
    names = list(file.schema_arrow.names)
    places = places_of(names, label, owner, labelled)
    _check_names(names)
    rows = file.metadata.num_rows
    if not rows:
        raise InputError("it is empty: give one row per sample")
    size = rows * len(names) * (NUMBER_BYTES + TEXT_BYTES)
    for group in range(file.metadata.num_row_groups):
        columns = file.metadata.row_group(group)
        size += TEXT_COPIES * sum(
            columns.column(place).total_uncompressed_size for place in range(columns.num_columns)
        )
    check_size(size, "reading it takes up to", data_limit())
    try:
        features = {
            names[place]: file.read([names[place]]).column(names[place]).to_pylist()
            for place in places.features(len(names))
        }
        labels = None if places.label is None else parquet_values(file, label)
        owners = None if owner is None else [str(name) for name in parquet_values(file, owner)]
    except Exception as error:  # of a damaged file
        raise InputError(f"it can't be read as Parquet ({in_short(error)})") from None
    return Columns(features, label_values(labels, label, labelled), owners)


def read_table(
    path: Path, categorical: Sequence[str] = (), label: str = LABEL, labelled: bool = True
) -> tuple[Table, Any]:
    """A file as a table, and its labels, if any; for columns see :func:`nufed.data.as_table`."""
    data = read_columns(path, label, labelled)
    with named_file(path):
        return as_table(data.columns, categorical), data.labels


def own_table(
    path: str = "",
    label: str = LABEL,
    owner: str | None = None,
    categorical: Sequence[str] = (),
    missing: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    regression: bool | None = None,
) -> Samples:
    """Your own table with categories and missing values, CSV or Parquet: data.args.path.

    Args:
        path: a ``.csv`` with a header, or a ``.parquet``.
        label: the column of labels.
        owner: the column that names the agent of a sample; by default samples are dealt out.
        categorical: columns of categories that are written as numbers.
        missing: further texts that mean a missing value, beside "", ?, NA, N/A, NaN and null.
        leave_out: columns that are not used.
        regression: whether labels are numbers to predict; by default whether some have fractions.
    """
    for name, text in (("path", path), ("label", label), ("owner", owner)):
        is_text = isinstance(text, str) or (text is None and name == "owner")
        require(is_text, f"data.args.{name}", text, "must be text")
    require(bool(path), "data.args.path", path, "must name a .csv or .parquet file")
    lists = {"categorical": categorical, "missing": missing, "leave_out": leave_out}
    for name, value in lists.items():
        texts = isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
        require(texts, f"data.args.{name}", value, 'must be a list of texts, for example ["sex"]')
    data = read_columns(Path(path), label, owner=owner)
    absent = [name for name in leave_out if name not in data.columns]
    require(
        not absent,
        "data.args.leave_out",
        list(leave_out),
        f"must be columns of the table, {', '.join(data.columns)}",
    )
    kept = {name: cells for name, cells in data.columns.items() if name not in leave_out}
    with named_file(Path(path)):
        table = as_table(kept, categorical, missing)
    return as_samples((table, targets_of(data.labels, regression), data.owners))
