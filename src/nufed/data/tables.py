"""Tables: columns of numbers and of categories, with missing values, and their preparation.

A :class:`Table` holds raw columns. A :class:`Preparation` turns them into inputs of a model. It is
learned from training rows alone, is a record of plain values, and does the same at any other site:

- numbers: (x − centre) / scale, where centre is the median or mean and scale the standard deviation
  of training; a missing value becomes 0, the centre;
- categories: one-hot; a missing one becomes the most frequent of training, and so does a category
  that no training row has;
- for a column with missing values one more input: 1 where the value is missing, else 0. It stays 0
  where no training row lacked the value, since nothing could be learned for it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nufed.data.samples import Column, Samples, Table, class_names, listed
from nufed.errors import InputError, require, shown
from nufed.registry import closest, suggest

# texts of a missing value; the last two are those of pandas
MISSING = ("", "?", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "<NA>", "NaT")
MAX_WORDS = 1000  # categories of a column
Fill: TypeAlias = Literal["median", "mean"]
Array: TypeAlias = np.ndarray[Any, Any]
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def as_table(
    columns: Mapping[str, Any], categorical: Sequence[str] = (), missing: Sequence[str] = ()
) -> Table:
    """A table from columns by name: a mapping of lists or arrays, or a data frame.

    A column of numbers, or of texts that are all numbers, holds numbers; one of other texts holds
    categories. A column with both is refused, unless ``categorical`` names it. Missing are None,
    NaN, empty texts, ``?``, ``NA``, ``N/A``, ``NaN``, ``null``, and those of ``missing``.

    >>> table = as_table({"age": [63, None], "pain": ["typical", "unknown"]}, missing=["unknown"])
    >>> [column.kind for column in table.columns], table.values.tolist()
    (['numbers', 'categories'], [[63.0, 0.0], [nan, nan]])
    """
    unknown = [name for name in categorical if name not in columns]
    if unknown:
        raise InputError(
            f"= {shown(list(categorical))}: there is no column {shown(unknown[0])}, the columns "
            f"are {listed(list(map(str, columns)))}{suggest(unknown[0], columns)}",
            "categorical",
        )
    nothing = {*MISSING, *(word.strip() for word in missing)}
    read = [
        _read_column(str(name), columns[name], str(name) in categorical, nothing)
        for name in columns
    ]
    lengths = {len(values) for _, values in read}
    if len(lengths) != 1 or lengths == {0}:
        raise InputError(
            f"the columns have {sorted(lengths)} values: give columns of one length, of at least "
            "one value"
        )
    values = torch.from_numpy(np.stack([values for _, values in read], axis=1))
    absent = tuple(sorted(nothing - {*MISSING}))
    return Table(tuple(replace(column, absent=absent) for column, _ in read), values)


def _read_column(
    name: str, given: Any, categorical: bool, missing: set[str]
) -> tuple[Column, Array]:
    array = given if isinstance(given, np.ndarray) else getattr(given, "to_numpy", lambda: None)()
    if array is not None and array.dtype.kind in "iuf" and array.ndim == 1 and not categorical:
        return Column(name), _finite(array.astype(np.float64), name)
    cells = [_cell(value, missing) for value in (given if array is None else array.tolist())]
    numbers = [cell is None or _NUMBER.fullmatch(cell) is not None for cell in cells]
    if not categorical and all(numbers):
        given = [math.nan if cell is None else float(cell) for cell in cells]
        return Column(name), _finite(np.array(given), name)
    present = [cell for cell in cells if cell is not None]
    if not categorical and any(_NUMBER.fullmatch(cell) for cell in present):
        row = numbers.index(False)
        raise InputError(
            f"the column {shown(name)} holds numbers and text ({shown(cells[row])} at row {row}, "
            "counted from 0): correct it, name the text in `missing` if it means a missing value, "
            "or name the column in `categorical`"
        )
    words = class_names(present)
    if len(words) > MAX_WORDS:
        raise InputError(
            f"the column {shown(name)} has {len(words)} different texts, and a category column may "
            f"have {MAX_WORDS}: remove it, or make it numbers"
        )
    places = {word: float(place) for place, word in enumerate(words)}
    coded = [math.nan if cell is None else places[cell] for cell in cells]
    return Column(name, words), np.array(coded, dtype=np.float64)


def _cell(value: Any, missing: set[str]) -> str | None:
    """A value as text, whole numbers without a point, so that 1.0 and 1 are one category."""
    text = str(value).strip()
    if value is None or text in missing:
        return None
    if _NUMBER.fullmatch(text):
        number = float(text)
        return str(int(number)) if number.is_integer() and abs(number) < 1e15 else text
    return text


def _finite(values: Array, name: str) -> Array:
    wrong = np.flatnonzero(np.isinf(values))
    if len(wrong):
        raise InputError(
            f"the column {shown(name)} is infinite at row {wrong[0]} (counted from 0): correct it, "
            "or leave the value out"
        )
    return values


@dataclass(frozen=True)
class PreparedColumn:
    """How a column becomes inputs: what was learned from training rows.

    Args:
        name: of the column.
        indicator: whether one more input says that the value is missing.
        missing: whether a training row lacked the value; otherwise the indicator stays 0.
        empty: no training row has a value, so that every value counts as missing.
        centre, scale: of numbers.
        words: the categories that have an input each; none: numbers.
        seen: those of training rows; others count as missing.
        usual: the most frequent one, which replaces a missing one.
        absent: texts that mean a missing value, beside the usual ones.
    """

    name: str
    indicator: bool = False
    missing: bool = False
    empty: bool = False
    centre: float = 0.0
    scale: float = 1.0
    words: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    usual: str = ""
    absent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = math.isfinite(self.centre) and math.isfinite(self.scale) and self.scale > 0
        require(numbers, f"column {self.name}: centre, scale", (self.centre, self.scale), "finite")
        known = set(self.seen) <= set(self.words) and (self.usual in self.seen or not self.seen)
        different = len(set(self.words)) == len(self.words) <= MAX_WORDS
        require(
            known and different,
            f"column {self.name}: words, seen, usual",
            (self.words, self.seen, self.usual),
            "must be different words, those seen among them, and one of these",
        )

    @property
    def width(self) -> int:
        """The number of inputs."""
        return (len(self.words) or 1) + self.indicator

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs."""
        values = [f"{self.name} = {word}" for word in self.words] or [self.name]
        return [*values, *([f"{self.name} is missing"] if self.indicator else [])]

    @classmethod
    def read(cls, content: Any) -> PreparedColumn:
        """Read a mapping from JSON or TOML; unknown keys and other types are refused."""
        return content if isinstance(content, cls) else cls(**_fields_of(cls, content))

    def apply(self, column: Column | None, values: Tensor) -> tuple[Tensor, Counter[str]]:
        """The inputs of a raw column, a row each, and the values that no training row has."""
        unseen: Counter[str] = Counter()
        if column is None or self.empty:
            values = torch.full_like(values, math.nan)
        elif self.words:
            values, unseen = self._places(column, values)
        else:
            self._check_numbers(column, values)
        missing = values.isnan()
        if self.words:
            usual = self.words.index(self.usual) if self.seen else -1  # of no input
            places = values.nan_to_num(nan=usual).long()
            inputs = (places[:, None] == torch.arange(len(self.words))).double()
        else:
            inputs = ((values.nan_to_num(nan=self.centre) - self.centre) / self.scale)[:, None]
        if self.indicator:
            inputs = torch.cat([inputs, (missing & self.missing).double()[:, None]], dim=1)
        return inputs, unseen

    def _places(self, column: Column, values: Tensor) -> tuple[Tensor, Counter[str]]:
        """The places of categories in ``words``, NaN where missing or not seen in training."""
        words = [_word(column, value) for value in values.tolist()]
        unseen = Counter(word for word in words if word and word not in self.seen)
        places = {word: self.words.index(word) for word in self.seen}
        coded = [math.nan if word is None else places.get(word, math.nan) for word in words]
        return torch.tensor(coded, dtype=torch.float64), unseen

    def _check_numbers(self, column: Column, values: Tensor) -> None:
        """Refuse categories where training had numbers."""
        if not column.words or values.isnan().all():
            return
        row = int((~values.isnan()).nonzero()[0])
        raise InputError(
            f"the column {shown(self.name)} holds {shown(column.words[int(values[row])])} at row "
            f"{row} (counted from 0): this model was trained on numbers there; give numbers, or "
            "leave missing values empty"
        )


def _fields_of(cls: type, content: Any) -> dict[str, Any]:
    """The fields of a dataclass from a mapping of JSON or TOML; others, and other types, are
    refused."""
    if not isinstance(content, Mapping) or "name" not in content:
        raise InputError(f"a column is a table with a name, not {shown(content)}")
    known = {field.name: str(field.type) for field in fields(cls)}
    for key, value in content.items():
        if key not in known:
            near = suggest(str(key), known)
            raise InputError(f"a column has no {shown(key)}, only {', '.join(known)}{near}")
        if not _is_of(value, known[key]):
            raise InputError(f"{key} of a column is {shown(value)}, not {known[key]}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}


def _is_of(value: object, kind: str) -> bool:
    """Whether a value of JSON or TOML has the type of a field."""
    if kind.startswith("tuple"):
        item = kind[len("tuple[") : -len(", ...]")]
        return isinstance(value, list | tuple) and all(_is_of(each, item) for each in value)
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    if kind == "float":
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, {"str": str, "int": int}[kind])


def _word(column: Column, value: float) -> str | None:
    """The category of a stored value; of numbers their text."""
    if math.isnan(value):
        return None
    if column.words:
        return column.words[int(value)]
    return _cell(value, set())


@dataclass(frozen=True)
class Preparation:
    """How raw columns become inputs: the record of a run and of its bundles."""

    columns: tuple[PreparedColumn, ...]

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        different = len(set(names)) == len(names) > 0
        require(different, "columns", names, "must be different, and at least one")

    @classmethod
    def read(cls, content: Any) -> Preparation:
        """Read a list of mappings, or a mapping with such ``columns``."""
        if isinstance(content, cls):
            return content
        given = content.get("columns") if isinstance(content, Mapping) else content
        if not isinstance(given, list | tuple):
            raise InputError(f"a preparation is a list of columns, not {shown(content)}")
        return cls(tuple(map(PreparedColumn.read, given)))

    @property
    def width(self) -> int:
        """The number of inputs."""
        return sum(column.width for column in self.columns)

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs."""
        return [name for column in self.columns for name in column.inputs]

    @property
    def categorical(self) -> list[str]:
        """The names of the columns of categories."""
        return [column.name for column in self.columns if column.words]

    def __str__(self) -> str:
        categories = len(self.categorical)
        return (
            f"{len(self.columns) - categories} columns of numbers and {categories} of categories "
            f"become {self.width} inputs"
        )

    def table(self, data: Any) -> Table:
        """Raw columns as a table, read as in training; columns of other names are left out."""
        if isinstance(data, Table):
            return data
        names = [column.name for column in self.columns]
        if not hasattr(data, "keys") or not hasattr(data, "__getitem__"):
            raise InputError(
                f"this model takes columns by name, and {type(data).__name__} has none: give a "
                f"mapping or data frame with {listed(names)}"
            )
        given = {name: data[name] for name in names if name in data}
        if not given:
            raise InputError(
                f"it has none of the columns that this model takes, {listed(names)}: its columns "
                f"are {listed([str(key) for key in data]) or 'none'}"
            )
        unused = [str(key) for key in data if key not in names]
        for name in names:
            near = None if name in given else closest(name, unused)
            if near is not None:
                raise InputError(
                    f"there is no column {shown(name)}, and {shown(near)} is none that this model "
                    "takes: rename it if it is the same, else leave it out, and the other counts "
                    "as missing"
                )
        absent = {text for column in self.columns for text in column.absent}
        return as_table(given, [n for n in self.categorical if n in given], sorted(absent))

    def apply(self, table: Table) -> tuple[Tensor, list[str]]:
        """The inputs (float32), and a sentence for everything that counts as missing."""
        places = {column.name: place for place, column in enumerate(table.columns)}
        parts, notes = [], []
        absent = [column.name for column in self.columns if column.name not in places]
        if len(absent) == len(self.columns):
            raise InputError(
                f"the table has none of the columns {listed(absent)}: its columns are "
                f"{listed(list(places))}"
            )
        if absent:
            notes.append(
                f"columns of training that are not there ({listed(absent)}) count as missing"
            )
        for column in self.columns:
            place = places.get(column.name)
            raw = None if place is None else table.columns[place]
            values = table.values[:, place or 0]
            inputs, unseen = column.apply(raw, values)
            parts.append(inputs)
            if unseen:
                count = sum(unseen.values())
                notes.append(
                    f"in column {shown(column.name)}, {count} value{'s' * (count > 1)} that no "
                    f"training row has ({listed(list(map(repr, unseen)))}) count as missing"
                )
        return torch.cat(parts, dim=1).float(), notes

    def describe(self) -> list[dict[str, Any]]:
        """The record as plain values, without those that are defaults."""
        defaults = asdict(PreparedColumn("", scale=1.0))
        return [
            {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in asdict(column).items()
                if key == "name" or value != defaults[key]
            }
            for column in self.columns
        ]


@dataclass(frozen=True)
class ColumnTally:
    """Counts and sums of a column at one agent, all that a site has to tell for a preparation.

    Args:
        name: of the column.
        present, missing: numbers of training rows with and without a value.
        mean, squares: of numbers: the mean, and the sum of squared deviations from it.
        words, counts: of categories: those that the data has, and how often training rows have
            each.
        indicator: whether any row of the agent, also outside of training, lacks the value.
        absent: texts that mean a missing value, beside the usual ones.
    """

    name: str
    present: int
    missing: int
    mean: float = 0.0
    squares: float = 0.0
    words: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    indicator: bool = False
    absent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = (self.present, self.missing, *self.counts)
        right = min(counts) >= 0 and len(self.counts) == len(self.words) and self.squares >= 0
        require(right, f"column {self.name}: counts", counts, "must be 0 or more, one per word")

    @classmethod
    def read(cls, content: Any) -> ColumnTally:
        """Read a mapping from JSON; unknown keys and other types are refused."""
        given = _fields_of(cls, content)
        if lacks := {"present", "missing"} - given.keys():
            raise InputError(f"the tally of column {shown(given['name'])} has no {min(lacks)}")
        return cls(**given)

    @classmethod
    def of(cls, column: Column, values: Tensor, indicator: bool) -> ColumnTally:
        """The tally of one agent's training rows."""
        known = values[~values.isnan()]
        missing = len(values) - len(known)
        if column.words:
            counts = tuple(known.long().bincount(minlength=len(column.words)).tolist())
            about: dict[str, Any] = {"words": column.words, "counts": counts}
        else:
            mean = float(known.mean()) if len(known) else 0.0
            about = {"mean": mean, "squares": float(((known - mean) ** 2).sum())}
        about |= {"indicator": indicator, "absent": column.absent}
        return cls(column.name, len(known), missing, **about)

    def plus(self, other: ColumnTally) -> ColumnTally:
        """The tally of the rows of both (Chan et al. 1979: stable where the mean is large)."""
        if (self.words and other.present and not other.words) or (
            other.words and self.present and not self.words
        ):
            raise InputError(
                f"the column {shown(self.name)} holds numbers at one site and categories at "
                "another: make them equal, or name it in `categorical` at all"
            )
        rows = self.present + other.present
        gap, share = other.mean - self.mean, other.present / rows if rows else 0.0
        mine, theirs = (dict(zip(t.words, t.counts, strict=True)) for t in (self, other))
        words = class_names([*self.words, *other.words])
        return replace(
            self,
            present=rows,
            missing=self.missing + other.missing,
            mean=self.mean + gap * share,
            squares=self.squares + other.squares + gap**2 * self.present * share,
            words=words,
            counts=tuple(mine.get(word, 0) + theirs.get(word, 0) for word in words),
            indicator=self.indicator or other.indicator,
            absent=tuple(sorted({*self.absent, *other.absent})),
        )

    def prepared(self, centre: float | None = None) -> PreparedColumn:
        """The column's preparation; numbers are centred at ``centre``, by default their mean."""
        about: dict[str, Any] = {}
        if self.words:
            seen = tuple(w for w, n in zip(self.words, self.counts, strict=True) if n)
            usual = self.words[int(np.argmax(self.counts))] if seen else ""
            about = {"words": self.words, "seen": seen, "usual": usual}
        elif self.present:
            spread = math.sqrt(self.squares / self.present)
            about = {"centre": self.mean if centre is None else centre, "scale": spread or 1.0}
        return PreparedColumn(
            self.name,
            indicator=self.indicator or self.missing > 0,
            missing=self.missing > 0,
            empty=not self.present,
            absent=self.absent,
            **about,
        )


def tally(samples: Samples, rows: Array) -> list[ColumnTally]:
    """Counts and sums of every raw column over one agent's training rows."""
    values = raw_values(samples)
    index, anywhere = torch.from_numpy(np.asarray(rows, dtype=np.int64)), values.isnan().any(dim=0)
    return [
        ColumnTally.of(column, values[index, place], bool(anywhere[place]))
        for place, column in enumerate(samples.columns)
    ]


def pooled(tallies: Iterable[Sequence[ColumnTally]]) -> list[ColumnTally]:
    """The tallies of several agents together, by column, in the order of the first."""
    sums: dict[str, ColumnTally] = {}
    for columns in tallies:
        for each in columns:
            sums[each.name] = sums[each.name].plus(each) if each.name in sums else each
    return list(sums.values())


def learn_preparation(
    samples: Samples, agents: Iterable[Array], fill: Fill = "median"
) -> Preparation:
    """A preparation learned from the training rows of agents, which are all that it looks at.

    Args:
        samples: with raw columns.
        agents: the training rows of every agent that takes part in training.
        fill: what numbers are centred at and what replaces missing ones. ``"mean"`` needs the
            agents' counts and sums alone, so that a federation can do the same.
    """
    rows = list(agents)
    together, values = pooled(tally(samples, each) for each in rows), raw_values(samples).numpy()
    every = np.concatenate(rows)
    centres: list[float | None] = [None] * len(together)
    if fill == "median":
        for place, column in enumerate(together):
            known = values[every, place]
            known = known[~np.isnan(known)]
            centres[place] = float(np.median(known)) if len(known) and not column.words else None
    return Preparation(tuple(t.prepared(c) for t, c in zip(together, centres, strict=True)))


def raw_values(samples: Samples) -> Tensor:
    """The raw columns of samples."""
    if not samples.columns:
        raise InputError("these samples have no raw columns: make them with nufed.data.as_table")
    assert isinstance(samples.inputs, Tensor)
    return samples.inputs


def prepare(samples: Samples, preparation: Preparation) -> tuple[Samples, list[str]]:
    """The samples with inputs for a model, and a sentence for what counts as missing."""
    inputs, notes = preparation.apply(Table(samples.columns, raw_values(samples)))
    return replace(samples, inputs=inputs, columns=(), preparation=preparation), notes
