"""Reads a user's data file: CSV with a header and a label column, or NPZ."""

from __future__ import annotations

import csv
import io
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nufed.data.limits import data_limit, read_bounded, read_npz
from nufed.errors import InputError, shown

LABEL = "label"
CSV_GROWTH = 8  # a value takes up to 8 times its bytes in a CSV file: "1," becomes a float64
# cells that spreadsheets interpret as formulas, and as numbers
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class Data(NamedTuple):
    """Inputs, one per row, and their labels, if any."""

    inputs: np.ndarray[Any, Any]
    labels: Sequence[str] | np.ndarray[Any, Any] | None


def read_data(path: Path, label: str = LABEL, labelled: bool = True) -> Data:
    """Read a file of samples.

    Args:
        path: a ``.csv`` with a header, one sample per line, all columns numeric except the
            label's; or a ``.npz`` with ``inputs`` and ``targets``.
        label: the name of the label column; labels are read by :func:`from_cell`.
        labelled: whether labels are required; otherwise they are read if present.
    """
    try:
        if path.suffix == ".csv":
            content = read_bounded(path, data_limit() // CSV_GROWTH)
            return _from_csv(content.decode("utf-8-sig"), label, labelled)
        if path.suffix == ".npz":
            return _from_npz(read_bounded(path, data_limit()), labelled)
    except (OSError, UnicodeDecodeError, csv.Error, InputError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} can't be used: {reason}") from None
    raise InputError(f"{path} can't be used: its name must end in .csv or .npz")


def to_cell(name: str) -> str:
    """A class name as a CSV cell that no spreadsheet interprets as a formula.

    One that begins with =, +, -, @, a tab or a line break and is not a number is prefixed with '.

    >>> to_cell("=1+1"), to_cell("-0.5"), to_cell("'-x")
    ("'=1+1", '-0.5', "''-x")
    """
    return f"'{name}" if _FORMULA.match(name) and not _NUMBER.fullmatch(name) else name


def from_cell(cell: str) -> str:
    """The class name written by :func:`to_cell`; of other cells the text, stripped of whitespace.

    >>> from_cell("'=1+1"), from_cell("-0.5"), from_cell("'tis")
    ('=1+1', '-0.5', "'tis")
    """
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell.strip()


def _from_csv(text: str, label: str, labelled: bool) -> Data:
    rows = (row for row in csv.reader(io.StringIO(text), strict=True) if row)
    header = next(rows, [])
    if label not in header and labelled and header:
        raise InputError(
            f"it has no column {shown(label)} (its first line is {shown(header[:6])}): name the "
            "columns in the first line, or give the label column with --label"
        )
    if header.count(label) > 1:
        raise InputError(f"it has {header.count(label)} columns {shown(label)}: it must have one")
    place = header.index(label) if label in header else None
    numbers, labels, line = array("d"), [], 1
    for line, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise InputError(f"line {line} has {len(row)} values, the header has {len(header)}")
        if place is not None:
            labels.append(from_cell(row.pop(place)))
        numbers.extend(_number(word, line) for word in row)
    if line == 1:
        raise InputError("it is empty: give a line of column names, then one line per sample")
    inputs = np.array(numbers).reshape(line - 1, -1) if numbers else np.empty((line - 1, 0))
    return Data(inputs, None if place is None else labels)


def _number(word: str, line: int) -> float:
    try:
        return float(word)
    except ValueError:
        what = "has an empty value" if not word.strip() else f"has {shown(word)}, not a number"
        raise InputError(f"line {line} {what}: every feature must be a number") from None


def _from_npz(content: bytes, labelled: bool) -> Data:
    try:
        arrays = read_npz(content, ("inputs", "targets"))
    except InputError:
        raise
    except Exception as error:  # zipfile and numpy may raise anything on a foreign file
        raise InputError(f"it is not an NPZ file of numbers ({error})") from None
    wanted = ("inputs", "targets") if labelled else ("inputs",)
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise InputError(f"it has no array {missing[0]!r}: save it with inputs= and targets=")
    return Data(arrays["inputs"], arrays.get("targets"))
