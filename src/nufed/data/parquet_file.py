"""Reads Parquet files of numeric columns, a label's and an owner's (extra ``frames``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from nufed.data.limits import check_size, data_limit
from nufed.data.sample_table import Data, places_of
from nufed.errors import InputError, in_short, shown

# the most that reading takes in memory (measured: tests/data/test_limits.py)
NUMBER_BYTES = 16  # for a feature of a row
TEXT_BYTES = 200  # for the label or the owner of a row, besides its characters
TEXT_COPIES = 4  # of its characters, at the same time


def read_parquet(content: bytes, label: str, owner: str | None, labelled: bool) -> Data:
    """Samples of a Parquet file; its size in memory is checked before it is unpacked."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise InputError('Parquet needs pyarrow: pip install "nufed[frames]"') from None
    try:
        # text stays as numbers of distinct values, so that repeated ones take no memory
        text = [name for name in (label, owner) if name is not None]
        file = pq.ParquetFile(pa.BufferReader(content), read_dictionary=text)
        names = list(file.schema_arrow.names)
    except Exception as error:  # of a foreign file
        raise InputError(f"it is not a Parquet file ({in_short(error)})") from None
    places = places_of(names, label, owner, labelled)
    features = [names[place] for place in places.features(len(names))]
    for name in features:
        kind = file.schema_arrow.field(name).type
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if not (is_number or pa.types.is_boolean(kind) or pa.types.is_decimal(kind)):
            raise InputError(
                f"column {shown(name)} is of type {kind}: every feature must be a number; remove "
                "that column, or encode it as numbers"
            )
    rows = file.metadata.num_rows
    if not rows:
        raise InputError("it is empty: give one row per sample")
    places_of_text = [place for place in places if place is not None]
    size = rows * (len(features) * NUMBER_BYTES + len(places_of_text) * TEXT_BYTES)
    for group in range(file.metadata.num_row_groups):
        columns = file.metadata.row_group(group)
        for place in places_of_text:
            size += TEXT_COPIES * columns.column(place).total_uncompressed_size
    check_size(size, "reading it takes up to", data_limit())
    try:
        inputs = np.empty((rows, len(features)))
        for place, name in enumerate(features):
            inputs[:, place] = file.read([name]).column(name).cast(pa.float64()).to_numpy()
        labels = None if places.label is None else _values(file.read([label]).column(label))
        owners = None if places.owner is None else _values(file.read([owner]).column(owner))
    except Exception as error:  # of a damaged file
        raise InputError(f"it can't be read as Parquet ({in_short(error)})") from None
    for row, place in np.argwhere(~np.isfinite(inputs))[:1]:
        raise InputError(
            f"row {row} (counted from 0), column {shown(features[place])} is missing or not "
            "finite: remove that row or column, or impute missing values"
        )
    named = None if owners is None else [str(name) for name in owners]
    return Data(inputs, _labels(labels, label, labelled), named)


def _values(column: Any) -> list[Any]:
    """Floating-point numbers or text by row, None if missing; rows with equal text share it."""
    import pyarrow as pa

    if pa.types.is_floating(column.type):
        return list(column.to_pylist())
    found: list[str | None] = []
    for chunk in column.chunks:
        coded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        values = (each.as_py() for each in coded.dictionary)
        distinct = [None if value is None else str(value) for value in values] + [None]
        found += [distinct[place] for place in coded.indices.fill_null(-1).to_numpy()]
    return found


def _labels(values: list[Any] | None, name: str, labelled: bool) -> Any:
    """Names of classes; numbers, if they are floating-point; None, if all are missing."""
    if values is None or (not labelled and all(value is None for value in values)):
        return None
    if None in values:
        raise InputError(
            f"row {values.index(None)} (counted from 0) has no {shown(name)}: give every label"
        )
    if all(isinstance(value, float) for value in values):
        return np.array(values)
    return values
