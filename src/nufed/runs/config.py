"""How a file and overrides become a configuration.

A configuration is a TOML file. Precedence: command line over file over default.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from nufed.errors import InputError, shown
from nufed.runs.messages import sentence, suggest
from nufed.runs.schema import Config, MethodConfig

DEEPEST = 20  # parts of a dotted key


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """A checked configuration from a preset's name, a TOML file or a mapping, and overrides.

    ``overrides`` are ``key=value`` with dotted keys and TOML values; bare words are strings.

    >>> load_config({"rounds": 5}, ["method.adapt_steps=3"]).method.adapt_steps
    3
    """
    tables = dict(source) if isinstance(source, Mapping) else _read(source)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not (key.strip() and equals):
            raise InputError(
                f"{shown(override)} is not an override: write key=value, for example rounds=50"
            )
        tables = _with(tables, key.strip().split("."), _value(text), override)
    try:
        config = Config.model_validate(tables)
    except ValidationError as error:
        raise InputError(
            sentence(error, _keys_with_methods(tables), dict(known_fields()))
        ) from None
    if len(set(config.seeds)) < len(config.seeds):
        raise InputError(f"seeds = {shown(config.seeds)}: each seed may stand there once")
    config.algorithms()
    return config


def presets() -> dict[str, str]:
    """The configurations shipped with nufed, with the first line of each as its description."""
    folder = files("nufed.runs") / "presets"
    texts = {f.name.removesuffix(".toml"): f.read_text("utf-8") for f in folder.iterdir()}
    return {name: texts[name].splitlines()[0].lstrip("# ") for name in sorted(texts)}


def known_keys() -> list[str]:
    """Every key of the schema, dotted."""
    return [key for key, _ in known_fields()]


def known_fields(
    table: type[BaseModel] = Config, prefix: str = ""
) -> Iterable[tuple[str, FieldInfo]]:
    """Every key of the schema, dotted, with what pydantic knows about it."""
    for name, field in table.model_fields.items():
        yield prefix + name, field
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from known_fields(kind, f"{prefix}{name}.")


def _read(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    if str(source) in presets():
        text = (files("nufed.runs") / "presets" / f"{source}.toml").read_text("utf-8")
    elif _is_file(path):
        text = _text(path)
    else:
        raise InputError(
            f"{shown(str(source))} is neither a preset ({', '.join(presets())}) nor a TOML file"
            + suggest(str(source), presets())
        )
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers and tables without end
        raise InputError(f"{source} is not valid TOML: {error}") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name that a file could have
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read as text: {error}") from None


def _value(text: str) -> Any:
    """What stands after the = of an override: TOML, or a string."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if len(found) == 1 else text


def _with(tables: Mapping[str, Any], key: list[str], value: Any, override: str) -> dict[str, Any]:
    """A copy of ``tables`` with one value set."""
    first, *rest = key
    if not rest:
        return {**tables, first: value}
    inner = tables.get(first, {})
    if not isinstance(inner, Mapping):
        raise InputError(f"{shown(override)} can't be set: {first} is a value, not a table")
    if len(rest) > DEEPEST:
        raise InputError(f"{shown(override)} can't be set: its key has too many parts")
    return {**tables, first: _with(inner, rest, value, override)}


def _keys_with_methods(tables: Mapping[str, Any]) -> list[str]:
    """Every key of the schema, and those of the methods that ``tables`` names."""
    methods = tables.get("methods")
    named = methods if isinstance(methods, Mapping) else {}
    return [*known_keys(), *(f"methods.{m}.{k}" for m in named for k in MethodConfig.model_fields)]
