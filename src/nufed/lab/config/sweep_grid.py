"""The grid of a sweep: one configuration for every combination of the swept keys' values.

Values come from the table ``[sweep]``, a mapping in Python and ``key=a,b,c`` or ``key=a..b`` on
the command line; a later source replaces the values of a key from an earlier one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from nufed.algorithms.protocol import Algorithm
from nufed.errors import InputError, shown
from nufed.lab.config.load import load_config, parse_value, read_config, read_tables, with_value
from nufed.lab.config.schema import Config

MAX_RUNS = 100  # unless the user allows more
MAX_NAME = 60  # characters of a run's name
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})")
_LIKE_RANGE = re.compile(r"[-+.\de]+\.\.[-+.\de]+")
_NOT_SWEPT = {
    "name": "runs are named after the swept values",
    "workers": "it changes no result, and all runs share one pool of workers",
    "threads": "all runs share one pool of workers",
    "seeds": "every run trains all seeds; set them for all runs with --seeds 3 or seeds=[0,1,2]",
}


@dataclass(frozen=True)
class GridPoint:
    """A run of a sweep: its name, the values of the swept keys, and its configuration."""

    name: str
    values: Mapping[str, Any]
    config: Config


@dataclass(frozen=True)
class Grid:
    """The swept keys with their values, the configuration without them, and all runs in order.

    The values of the last key change fastest.
    """

    keys: Mapping[str, Sequence[Any]]
    base: Config
    points: Sequence[GridPoint]


def make_grid(
    source: str | Path | Mapping[str, Any],
    values: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    *,
    max_runs: int = MAX_RUNS,
    methods: Mapping[str, Algorithm] | None = None,
) -> Grid:
    """The grid of a sweep, with every configuration validated.

    Args:
        source: a preset's name, a TOML file or a mapping, possibly with a table ``sweep``.
        values: dotted keys with a list of values each, or a range ``"0..5"``.
        settings: ``key=value`` for all runs; ``key=a,b,c`` and ``key=a..b`` are swept.
        max_runs: the largest number of runs to accept.
        methods: algorithms given in Python.

    >>> grid = make_grid({}, {"method.adapt_steps": "0..2"}, ["rounds=5", "data.dirichlet=0.1,1"])
    >>> [point.name for point in grid.points][:2], grid.points[5].config.rounds
    (['01-adapt_steps-0_dirichlet-0.1', '02-adapt_steps-0_dirichlet-1'], 5)
    """
    tables = read_tables(source)
    table = tables.pop("sweep", {})
    if not isinstance(table, Mapping):
        raise InputError(f"sweep = {shown(table)}: must be a table of keys with lists of values")
    keys = {**by_dotted_key(table), **(values or {})}
    overrides = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if key.partition(".")[0].strip() == "sweep":
            raise InputError(f"{shown(setting)}: write the swept key itself, such as rounds=10,20")
        swept_values = _on_command_line(text) if equals else None
        if swept_values is None:
            overrides.append(setting)
            keys.pop(key.strip(), None)
        else:
            keys[key.strip()] = swept_values
    swept = {key: _values(key, given) for key, given in keys.items()}
    _check_number(swept, max_runs)
    for key, each in swept.items():
        _check_distinct(key, each)
    base = read_config(tables, overrides)
    combinations = [dict(zip(swept, each, strict=True)) for each in product(*swept.values())]
    points = []
    for number, chosen in enumerate(combinations, start=1):
        name = _name(number, len(combinations), chosen)
        points.append(GridPoint(name, chosen, _config(tables, overrides, chosen, methods)))
    return Grid({key: list(each) for key, each in swept.items()}, base, points)


def in_words(values: Mapping[str, Any]) -> str:
    """The values of swept keys as text.

    >>> in_words({"data.dirichlet": 0.1, "method.curvature": "exact"})
    'data.dirichlet = 0.1, method.curvature = exact'
    """
    return ", ".join(f"{key} = {value_text(value)}" for key, value in values.items())


def value_text(value: Any) -> str:
    """A value as text: strings plain, other values as in JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _config(
    tables: Mapping[str, Any],
    overrides: Sequence[str],
    chosen: dict[str, Any],
    methods: Mapping[str, Algorithm] | None,
) -> Config:
    """The configuration of one run."""
    for key, value in chosen.items():
        tables = with_value(tables, key, value, f"{key}={value_text(value)}")
    try:
        return load_config(tables, overrides, methods)
    except InputError as error:
        raise of_run(error, chosen) from error


def of_run(error: InputError, chosen: Mapping[str, Any]) -> InputError:
    """This error with the run's values added, unless it is about a swept key."""
    about_swept = any(f"{error.key}.".startswith(f"{key}.") for key in chosen)
    return error if about_swept else InputError(f"{error} (in the run with {in_words(chosen)})")


def by_dotted_key(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested tables by dotted key, such as ``data.dirichlet``."""
    by_key: dict[str, Any] = {}
    for key, value in table.items():
        inner = isinstance(value, Mapping)
        by_key |= by_dotted_key(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return by_key


def _on_command_line(text: str) -> Any:
    """The values of ``key=a,b`` or ``key=a..b``; None if it is a single value, for all runs."""
    if _LIKE_RANGE.fullmatch(text.strip()):
        return text.strip()
    values = parse_value(f"[{text}]")
    if not isinstance(values, list):  # bare words are strings
        values = [parse_value(word.strip()) for word in text.split(",")]
    return None if len(values) == 1 else values


def _values(key: str, given: Any) -> Sequence[Any]:
    """The values of a key, validated as far as they do not depend on it."""
    if key.partition(".")[0] in _NOT_SWEPT:
        reason = _NOT_SWEPT[key.partition(".")[0]]
        raise InputError(f"{key} can't be swept: {reason}")
    if hasattr(given, "tolist"):  # an array
        given = given.tolist()
    if isinstance(given, str):
        return _range(key, given)
    if not isinstance(given, list | tuple | range):
        raise InputError(
            f"sweep: {key} = {shown(given)}: must be a list of values, or a range of whole numbers "
            'such as "0..5"'
        )
    if not given:
        raise InputError(f"sweep: {key} has no values: give at least one")
    return given


def _check_distinct(key: str, values: Sequence[Any]) -> None:
    for place, value in enumerate(() if isinstance(values, range) else values):
        if value == "" or value is None:
            raise InputError(f"sweep: {key} = {shown(values)}: a value is empty; remove it")
        if value in values[:place]:
            raise InputError(f"sweep: {key} has the value {shown(value)} twice: give it once")


def _range(key: str, text: str) -> range:
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"sweep: {key} = {shown(text)}: must be a list of values, or a range of whole numbers "
            'such as "0..5"'
        )
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise InputError(
            f"sweep: {key} = {text}: the range is reversed; write {last}..{first}, from the "
            "smallest to the largest value"
        )
    return range(first, last + 1)


def _check_number(swept: Mapping[str, Sequence[Any]], most: int) -> None:
    if not swept:
        raise InputError(
            "no key is swept: give at least one with its values, for example "
            "data.dirichlet=0.01,0.1,1 or method.adapt_steps=0..5, or a table [sweep]"
        )
    number = prod(map(len, swept.values()))
    if number > most:
        by_key = " × ".join(f"{len(values)} of {key}" for key, values in swept.items())
        raise InputError(
            f"the sweep would have {number:,} runs ({by_key}) and the limit is {most}: give fewer "
            f"values, or raise the limit with --max-runs {number} (in Python max_runs={number})"
        )


def _name(number: int, of: int, chosen: Mapping[str, Any]) -> str:
    """A name that is safe as a file name; its number makes it unique."""
    last = [key.rpartition(".")[2] for key in chosen]
    words = [
        f"{short if last.count(short) == 1 else key}-{value_text(value)}".strip('"[]{}')
        for short, (key, value) in zip(last, chosen.items(), strict=True)
    ]
    safe = re.sub(r"-?[^A-Za-z0-9._-]+", "-", "_".join(words))
    width = max(2, len(str(of)))
    return f"{number:0{width}d}-{safe}"[:MAX_NAME].rstrip("-._")
