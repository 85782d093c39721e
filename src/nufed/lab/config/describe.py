"""Describes settings, from the fields of algorithms: for messages, ``nufed list`` and the docs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING
from typing import Annotated, Any, NamedTuple

from pydantic import Field as Key, StringConstraints, ValidationError
from pydantic.fields import FieldInfo

from nufed.algorithms import ALGORITHMS
from nufed.errors import InputError, in_short, shown
from nufed.registry import Registry, closest
from nufed.settings import Field, settings_of

# used as a directory name: no separators, no leading dot
Name = Annotated[str, StringConstraints(pattern=r"^[\w][\w.-]*$", max_length=80)]

OWN = "given in Python"  # placeholder in a configuration for an object passed in Python
AT_SITES = "at the sites"  # placeholder for the data of a federation


def key(default: Any, about: str | None = None, **limits: Any) -> Any:
    """A key of a table: its default (``...``: it must be given), and one line about it."""
    return Key(default=default, description=about, **limits)


def optional(default: Any, about: str | None = None, **limits: Any) -> Any:
    """A key that is written only where it differs from its default.

    So a new one changes neither files nor fingerprints of runs that do not use it.
    """
    return key(default, about, exclude_if=lambda value: value == default, **limits)


class Described(NamedTuple):
    """The description of a key of a method's table."""

    key: str
    about: str
    allowed: str
    default: str
    tuned: str  # the range that `nufed tune` searches by default, if any

    def __str__(self) -> str:
        return f"{self.about}; {self.allowed} ({self.usual})"

    @property
    def usual(self) -> str:
        """Its default and the range that is searched."""
        return f"default {self.default}" + (f"; tuned from {self.tuned}" if self.tuned else "")


def described(cls: type) -> list[Described]:
    """Every key of a class, including those of the classes that it may choose from.

    >>> from nufed.algorithms.aggregation import TrimmedMean
    >>> print(*described(TrimmedMean))
    share trimmed at each end; a finite number, 0 or more and below 0.5 (default 0.2)
    """
    return [_described(field, where) for field, where in every_setting(cls)]


def _described(field: Field, where: str = "") -> Described:
    return Described(
        field.name,
        field.setting.about + (f", with {where}" if where else ""),
        field.allowed() or "only in Python",
        _default(field),
        str(field.setting.search or ""),
    )


def described_by_key(cls: type) -> dict[str, str]:
    """The description of every key; of several choices that have it, with the default of each.

    >>> from nufed.algorithms import FedAvg
    >>> print(described_by_key(FedAvg)["optimizer_tau"])
    τ, adaptivity of the server; a finite number, above 0 (with server_optimizer = "adagrad": \
default 0.001; with server_optimizer = "adam": default 0.001; with server_optimizer = "yogi": \
default 0.001)
    """
    by_key: dict[str, list[tuple[Field, str]]] = {}
    for field, where in every_setting(cls):
        by_key.setdefault(field.name, []).append((field, where))
    return {key: _together(same) for key, same in by_key.items()}


def _together(same: list[tuple[Field, str]]) -> str:
    """The description of a setting under several conditions."""
    if len(same) == 1:
        return str(_described(*same[0]))
    first = _described(same[0][0])
    defaults = [f"with {where}: {_described(field).usual}" for field, where in same]
    return f"{first.about}; {first.allowed} ({'; '.join(defaults)})"


def known_settings() -> dict[str, str]:
    """The keys of all registered algorithms, with the first description of each."""
    settings: dict[str, str] = {}
    for cls in ALGORITHMS.working().values():
        settings = described_by_key(cls) | settings
    return dict(sorted(settings.items()))


def every_setting(cls: type) -> Iterator[tuple[Field, str]]:
    """The settings of a class and of its choices, the latter with their condition key = "name"."""
    for field in fields_of(cls):
        yield field, ""
        choices = field.setting.choices or {}
        parts = choices.working() if isinstance(choices, Registry) else choices
        for name, part in parts.items():
            for inner, _ in every_setting(part):
                yield inner, f'{field.name} = "{name}"'


def fields_of(cls: type) -> tuple[Field, ...]:
    """The settings of a class, which may be the user's own."""
    try:
        return settings_of(cls)
    except Exception as error:  # not a dataclass, or type hints that can't be resolved
        raise InputError(
            f"the settings of {cls.__module__}:{cls.__qualname__} can't be read: "
            f"{in_short(error)}; it must be a dataclass with type hints"
        ) from error


def name_of(cls: type, choices: Mapping[str, type]) -> str:
    """The name of a class in a configuration."""
    names = (name for name in choices if choices[name] is cls)
    return next(names, f"{cls.__module__}:{cls.__qualname__}")


def _default(field: Field) -> str:
    if field.default is MISSING:
        return "none, it must be set"
    choices, setting = field.setting.choices, field.setting
    if setting.follows is not None:
        return f"that of {setting.follows}"
    if setting.of_rounds is not None:
        return f"{setting.of_rounds:.0%} of rounds"
    if setting.of_longest_step is not None:
        return f"{field.default!r}, in a run {setting.of_longest_step:g}/κ"
    return repr(field.default) if choices is None else repr(name_of(type(field.default), choices))


_BOUNDS = {"gt": "above {}", "ge": "at least {}", "lt": "below {}", "le": "at most {}"}


def input_error(
    error: ValidationError, known: Iterable[str], fields: Mapping[str, FieldInfo]
) -> InputError:
    """The first of pydantic's validation errors.

    ``known`` are candidates for a misspelt key; ``fields`` give the allowed ranges.
    """
    errors = [(_key(e), e) for e in error.errors(include_url=False)]
    key, first = errors[0]
    if first["type"] == "extra_forbidden":
        near = suggest_key(key, known) or "; `nufed list` shows all keys"
        return InputError(f"unknown key {shown(key)}{near}")
    if first["type"] in ("invalid_key", "string_unicode"):
        where = shown(key) if key else "the settings"
        return InputError(f"{shown(first['input'])} in {where} is not text")
    if first["type"] == "missing":
        return InputError(f"the key {key!r} is missing")
    # a union reports one error per member: any of them is allowed
    reasons = [_reason(e, fields.get(key)) for k, e in errors if k == key]
    name = key if key.isprintable() and len(key) < 200 else shown(key)
    allowed = " or ".join(dict.fromkeys(reasons))
    return InputError(f"= {shown(first['input'])}: must be {allowed}", name)


def suggest_key(given: str, known: Iterable[str]) -> str:
    """The known key that a misspelt one likely means, as the end of a sentence; empty if none is
    close.

    Looks for a close last part in the same table, or in all if it names no known one or none is
    close at the top; then for the same last part in another table.

    >>> suggest_key("data.agent", ["rounds", "data.agents"])
    "; did you mean 'data.agents'?"
    >>> suggest_key("data.qqq", ["rounds", "data.agents"])
    ''
    """
    keys, (table, _, last) = list(known), given.rpartition(".")
    inside = [key for key in keys if key.rpartition(".")[0] == table]
    below = [key for key in keys if key.startswith(f"{table}.")] if table else keys
    close = _close(last, inside) or _close(last, below or keys)
    close = close or [key for key in keys if key.rpartition(".")[2] == last]
    nearest = difflib.get_close_matches(given, close, n=1, cutoff=0)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _close(last: str, keys: Iterable[str]) -> list[str]:
    """The keys whose last part is the one closest to ``last``, if any is close."""
    by_last: dict[str, list[str]] = {}
    for key in keys:
        by_last.setdefault(key.rpartition(".")[2], []).append(key)
    return by_last.get(closest(last, by_last) or "", [])


def _key(error: Any) -> str:
    """The dotted key of an error, without the member of a union that pydantic appends."""
    *outer, last = (str(p) for p in error["loc"] or ("",))
    members = ("float", "int", "constrained-int", "[key]")
    is_key = error["type"] in ("extra_forbidden", "invalid_key") or outer == ["methods"]
    member = last in members or last.startswith("literal[")
    return ".".join(outer if member and not is_key else [*outer, last])


def _reason(error: Any, field: FieldInfo | None) -> str:
    limits = field.metadata if field else []
    bounds = [_BOUNDS[k].format(getattr(m, k)) for m in limits for k in _BOUNDS if hasattr(m, k)]
    match error["type"]:
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal" if bounds:
            return "a number " + " and ".join(bounds)
        case "string_pattern_mismatch":
            return "made of letters, digits, '.', '-' and '_'"
        case "model_type" | "dict_type":
            return "a table"
        case "too_short":
            return "a list of at least one value"
        case "value_error":
            return str(error["ctx"]["error"])
    return str(error["msg"]).removeprefix("Input should be ")
