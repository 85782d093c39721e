"""Loads a configuration from a TOML file and overrides.

Precedence: command line over file over default.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from nufed.algorithms import ALGORITHMS
from nufed.algorithms.protocol import Algorithm
from nufed.errors import InputError, require, shown
from nufed.lab.config.describe import every_setting, input_error, known_settings
from nufed.lab.config.methods import MethodConfig
from nufed.lab.config.schema import Config
from nufed.lab.config.trust import import_methods
from nufed.meta.curvature import HessianFree
from nufed.registry import suggest

MAX_KEY_PARTS = 20  # of a dotted key


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    methods: Mapping[str, Algorithm] | None = None,
) -> Config:
    """A validated configuration from a preset's name, a TOML file or a mapping, and overrides.

    ``overrides`` are ``key=value`` with dotted keys and TOML values; bare words are strings.
    ``methods`` are algorithms given in Python; ``[method]`` sets what they leave to defaults.
    Algorithms that it names as ``package.module:Class`` are imported, and the defaults of all
    settings are written out in it.

    >>> config = load_config({"rounds": 5}, ["method.adapt_steps=3"])
    >>> config.method.adapt_steps, config.method.batch_size
    (3, 40)
    """
    config = read_config(source, overrides)
    import_methods(config)
    config = config.with_objects(methods or {}, shared=config.method)
    _check_precision(config, config.algorithms(methods, recorded=False))
    return config.written_out(looks=True)


def _check_precision(config: Config, algorithms: Mapping[str, Algorithm]) -> None:
    """Refuse mixed precision where it can't work."""
    obstacle = no_mixed_precision(config, algorithms)
    if config.precision == "bfloat16" and obstacle:
        raise InputError(f'= "bfloat16": {obstacle}', "precision")


def no_mixed_precision(config: Config, algorithms: Mapping[str, Algorithm]) -> str:
    """Why mixed precision can't work; "" if it can."""
    if config.dtype != "float32":
        return f'dtype = "{config.dtype}", and must be "float32"'
    for name, algorithm in algorithms.items():
        if any(isinstance(value, HessianFree) for value in vars(algorithm).values()):
            return (
                f"the finite differences of method {name} drown in its rounding; use "
                'curvature = "exact" or "first_order", or precision = "float32"'
            )
    return ""


def read_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """A configuration whose algorithms and their settings are not validated: it imports nothing."""
    tables = with_overrides(source, overrides)
    try:
        config = Config.model_validate(tables)
    except ValidationError as error:
        raise input_error(error, _keys_with_methods(tables), dict(known_fields())) from None
    distinct = len(set(config.seeds)) == len(config.seeds)
    require(distinct, "seeds", config.seeds, "seeds must be distinct")
    allowed = "is for all methods: write it at the top, or in [methods.NAME]"
    require(config.method.rounds is None, "method.rounds", config.method.rounds, allowed)
    one = not (config.data.unseen and config.data.unseen_agents)
    allowed = (
        f"must not be given with data.unseen_agents = {config.data.unseen_agents}; set that to 0, "
        "or remove one of them"
    )
    require(one, "data.unseen", config.data.unseen, allowed)
    return config


def presets() -> dict[str, str]:
    """The configurations shipped with nufed, with the first line of each as its description.

    Those in folders, such as ``board/heart``, come last.
    """
    texts = {name: file.read_text("utf-8") for name, file in _shipped().items()}
    return {name: texts[name].splitlines()[0].lstrip("# ") for name in texts}


def _shipped() -> dict[str, Traversable]:
    """The files of presets by name."""
    folder = files("nufed.lab.config") / "presets"
    shipped: dict[str, Traversable] = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: (entry.is_dir(), entry.name)):
        inside = sorted(entry.iterdir(), key=lambda file: file.name) if entry.is_dir() else [entry]
        group = f"{entry.name}/" if entry.is_dir() else ""
        shipped |= {f"{group}{file.name.removesuffix('.toml')}": file for file in inside}
    return shipped


def only_methods(source: str | Path | Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The tables of a configuration with some of its methods, in its order.

    Keys of ``[method]`` that only the others have are left out, and what ``[tune]`` and ``[tuned]``
    say of these.
    """
    tables = read_tables(source)
    methods = tables.get("methods", {})
    for name in names:
        if name not in methods:
            raise InputError(
                f"--methods {shown(name)}: must be some of {', '.join(methods) or 'none'}, the "
                f"methods of this configuration{suggest(name, methods)}"
            )

    def keys(kept: bool) -> set[str]:
        """The settings of the methods that are kept, or of the others."""
        shared = tables.get("method", {}).get("algorithm")
        of = [
            table.get("algorithm") or shared or key.replace("-", "_")
            for key, table in methods.items()
            if (key in names) == kept
        ]
        known = [ALGORITHMS[name] for name in of if name in ALGORITHMS]
        return {setting.name for cls in known for setting, _ in every_setting(cls)}

    dropped = keys(False) - keys(True)
    tables["methods"] = {name: table for name, table in methods.items() if name in names}
    if "method" in tables:
        tables["method"] = {k: v for k, v in tables["method"].items() if k not in dropped}
    for table, parts in (("tune", ("methods",)), ("tuned", ("trials", "choices"))):
        for part in parts:
            if part in tables.get(table, {}):
                of_methods = tables[table][part].items()
                kept = {name: value for name, value in of_methods if name in names}
                tables[table] = {**tables[table], part: kept}
    return tables


def known_keys() -> list[str]:
    """Every dotted key of the schema, and the settings of all registered algorithms."""
    settings = [f"method.{name}" for name in sorted(known_settings())]
    return [*(key for key, _ in known_fields()), *settings]


def known_fields(
    table: type[BaseModel] = Config, prefix: str = ""
) -> Iterable[tuple[str, FieldInfo]]:
    """Every dotted key of the schema, with its pydantic field."""
    for name, field in table.model_fields.items():
        yield prefix + name, field
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from known_fields(kind, f"{prefix}{name}.")


def read_tables(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a preset, a TOML file or a mapping, not validated."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    if str(source) in presets():
        text = _shipped()[str(source)].read_text("utf-8")
    elif _is_file(path):
        text = _text(path)
    else:
        raise InputError(
            f"{shown(str(source))} is neither a preset ({', '.join(presets())}) nor a TOML file"
            + suggest(str(source), presets())
        )
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also huge numbers and deep nesting
        raise InputError(f"{source} is not valid TOML: {error}") from None


def with_overrides(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str]
) -> dict[str, Any]:
    """The tables of a source with ``key=value`` set, not validated."""
    tables = read_tables(source)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not (key.strip() and equals):
            raise InputError(
                f"{shown(override)} is not an override: write key=value, for example rounds=50"
            )
        tables = with_value(tables, key.strip(), parse_value(text), override)
    return tables


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read as text: {error}") from None


def parse_value(text: str) -> Any:
    """The value of an override: TOML, or a string; ``nan`` and ``inf`` are no numbers here."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = table["value"] if len(table) == 1 else text
    return text if isinstance(value, float) and not math.isfinite(value) else value


def with_value(tables: Mapping[str, Any], key: str, value: Any, setting: str) -> dict[str, Any]:
    """A copy of ``tables`` with the value of a dotted key set; messages name the ``setting``."""
    first, dot, rest = key.partition(".")
    if not dot:
        return {**tables, first: value}
    inner = tables.get(first, {})
    if not isinstance(inner, Mapping):
        raise InputError(f"{shown(setting)} can't be set: {first} is a value, not a table")
    if rest.count(".") >= MAX_KEY_PARTS:
        raise InputError(f"{shown(setting)} can't be set: its key has too many parts")
    return {**tables, first: with_value(inner, rest, value, setting)}


def _keys_with_methods(tables: Mapping[str, Any]) -> list[str]:
    """Every key of the schema, and those of the methods that ``tables`` names."""
    methods = tables.get("methods")
    named = methods if isinstance(methods, Mapping) else {}
    keys = [*MethodConfig.model_fields, *sorted(known_settings())]
    return [*known_keys(), *(f"methods.{m}.{k}" for m in named for k in keys)]
