"""Reads Parquet files of numeric columns, a label's and an owner's (extra ``frames``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from nufed.data.limits import check_size, data_limit
from nufed.data.sample_table import Data, places_of
from nufed.errors import InputError, in_short, shown

NUMBER_BYTES = 8


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
    check_size(rows * len(names) * NUMBER_BYTES, "it unpacks to", data_limit())
    try:
        table = file.read()
        inputs = np.empty((rows, len(features)))
        for place, name in enumerate(features):
            inputs[:, place] = table.column(name).cast(pa.float64()).to_numpy()
        labels = None if places.label is None else table.column(label).to_pylist()
        owners = None if places.owner is None else table.column(owner).to_pylist()
    except Exception as error:  # of a damaged file
        raise InputError(f"it can't be read as Parquet ({in_short(error)})") from None
    for row, place in np.argwhere(~np.isfinite(inputs))[:1]:
        raise InputError(
            f"row {row} (counted from 0), column {shown(features[place])} is missing or not "
            "finite: remove that row or column, or impute missing values"
        )
    named = None if owners is None else [str(name) for name in owners]
    return Data(inputs, _labels(labels, label, labelled), named)


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
    return [value if isinstance(value, str) else str(value) for value in values]
