"""A person's data as a file: CSV with a header and a label column, or NPZ."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nufed.errors import InputError

LABEL = "label"


class Data(NamedTuple):
    """Inputs, one per row, and what is known about them."""

    inputs: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any] | None


def read_data(path: Path, label: str = LABEL, labelled: bool = True) -> Data:
    """Read a file of samples.

    Args:
        path: a ``.csv`` with a header, one sample per line, all columns numbers but for the
            label's; or a ``.npz`` with ``inputs`` and ``targets``.
        label: the name of the column that holds the label.
        labelled: whether labels are needed; else they are read if they are there.
    """
    try:
        if path.suffix == ".csv":
            return _from_csv(path.read_text("utf-8-sig"), label, labelled)
        if path.suffix == ".npz":
            return _from_npz(path.read_bytes(), labelled)
    except (OSError, UnicodeDecodeError, csv.Error, InputError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} can't be used: {reason}") from None
    raise InputError(f"{path} can't be used: its name must end in .csv or .npz")


def _from_csv(text: str, label: str, labelled: bool) -> Data:
    header, *lines = [row for row in csv.reader(io.StringIO(text), strict=True) if row] or [[]]
    if not lines:
        raise InputError("it is empty: give a line of column names, then one line per sample")
    if label not in header and labelled:
        some = ", ".join(header[:6]) + (", …" if len(header) > 6 else "")
        raise InputError(
            f"it has no column {label!r} (its first line is {some}): name the columns in the first "
            "line, or say with --label which one holds the label"
        )
    if header.count(label) > 1:
        raise InputError(f"it has {header.count(label)} columns {label!r}: it must have one")
    place = header.index(label) if label in header else None
    for number, row in enumerate(lines, start=2):
        if len(row) != len(header):
            raise InputError(f"line {number} has {len(row)} values and the header {len(header)}")
    features = [[x for i, x in enumerate(row) if i != place] for row in lines]
    labels = None if place is None else np.array([row[place].strip() for row in lines])
    return Data(_numbers(features), labels)


def _numbers(rows: list[list[str]]) -> np.ndarray[Any, Any]:
    try:
        return np.array(rows, dtype=np.float64)
    except ValueError:
        line, word = next(
            (line, word) for line, row in enumerate(rows, start=2) for word in row if _bad(word)
        )
        what = "has an empty value" if not word.strip() else f"holds {word!r}, which is no number"
        raise InputError(f"line {line} {what}: every feature must be a number") from None


def _bad(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return True
    return False


def _from_npz(content: bytes, labelled: bool) -> Data:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("inputs", "targets") if name in archive}
    except Exception as error:  # whatever a foreign file does to zipfile and numpy
        raise InputError(f"it is not an NPZ file of numbers ({error})") from None
    wanted = ("inputs", "targets") if labelled else ("inputs",)
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise InputError(f"it has no array {missing[0]!r}: save it with inputs= and targets=")
    return Data(arrays["inputs"], arrays.get("targets"))
