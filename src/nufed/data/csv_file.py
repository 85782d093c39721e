"""Reads CSV files with a header: separated by commas, semicolons or tabs."""

from __future__ import annotations

import csv
import io
import math
import re
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from nufed.data.sample_table import Data, Places, places_of
from nufed.errors import InputError, shown

# cells that spreadsheets interpret as formulas, and as numbers
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


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


def read_csv(text: str, label: str, owner: str | None, labelled: bool) -> Data:
    """Samples of a CSV file; the separator is the one that gives its header the most columns.

    With semicolons or tabs, numbers may have a decimal comma.
    """
    separator = _separator(text)
    reader = csv.reader(io.StringIO(text), delimiter=separator, strict=True)
    header = next((row for row in reader if row), [])
    header = [name.strip() for name in header]
    places = places_of(header, label, owner, labelled) if header else Places(None, None)
    numbers, labels, owners, count = array("d"), [], [], 0
    for row in (row for row in reader if row):
        line, count = reader.line_num, count + 1
        if len(row) != len(header):
            raise InputError(f"line {line} has {len(row)} values, the header has {len(header)}")
        if places.label is not None:
            labels.append(from_cell(row[places.label]))
            if labelled and not labels[-1]:
                raise InputError(f"line {line} has an empty {shown(label)}: give every label")
        if places.owner is not None:
            owners.append(row[places.owner].strip())
        numbers.extend(_numbers(row, places.features(len(header)), header, line, separator))
    if not count:
        raise InputError("it is empty: give a line of column names, then one line per sample")
    inputs = np.array(numbers).reshape(count, -1) if numbers else np.empty((count, 0))
    return Data(inputs, labels if any(labels) else None, owners or None)


def _separator(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "")

    def columns(separator: str) -> int:
        try:
            return len(next(csv.reader([line], delimiter=separator, strict=True), []))
        except csv.Error:
            return 0

    return max(",;\t", key=columns)  # the comma, if others do no better


def _numbers(
    row: Sequence[str], places: Sequence[int], header: Sequence[str], line: int, separator: str
) -> Iterator[float]:
    for place in places:
        word = row[place]
        try:
            value = float(word if separator == "," else word.replace(",", "."))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            what = f"has {shown(word)}, not a finite number" if word.strip() else "is empty"
            raise InputError(
                f"line {line}, column {shown(header[place])} {what}: every feature must be a "
                "number; remove that line or column, or impute missing values"
            )
        yield value
