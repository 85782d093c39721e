"""Descriptions of settings, from the fields of algorithms: for messages, ``nufed list``, docs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from typing import NamedTuple

from nufed.algorithms import ALGORITHMS
from nufed.errors import InputError, in_short
from nufed.registry import Registry
from nufed.settings import Field, settings_of


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
    return [
        Described(
            field.name,
            field.setting.about + (f", with {where}" if where else ""),
            field.allowed() or "only in Python",
            _default(field),
            str(field.setting.search or ""),
        )
        for field, where in every_setting(cls)
    ]


def described_by_key(cls: type) -> dict[str, str]:
    """The description of every key; of several choices that have it, with the default of each.

    >>> from nufed.algorithms import FedAvg
    >>> print(described_by_key(FedAvg)["optimizer_tau"])
    τ, adaptivity of the server; a finite number, above 0 (with server_optimizer = "adagrad": \
default 0.001; with server_optimizer = "adam": default 0.001; with server_optimizer = "yogi": \
default 0.001)
    """
    found: dict[str, list[Described]] = {}
    for each in described(cls):
        found.setdefault(each.key, []).append(each)
    return {key: _together(same) for key, same in found.items()}


def _together(same: list[Described]) -> str:
    first, *others = same
    if not others:
        return str(first)
    defaults = [f"with {each.about.rpartition(', with ')[2]}: {each.usual}" for each in same]
    about = first.about.rpartition(", with ")[0]
    return f"{about}; {first.allowed} ({'; '.join(defaults)})"


def known_settings() -> dict[str, str]:
    """The keys of all registered algorithms, with the first description of each."""
    found: dict[str, str] = {}
    for cls in ALGORITHMS.working().values():
        found = described_by_key(cls) | found
    return dict(sorted(found.items()))


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
    choices = field.setting.choices
    return repr(field.default) if choices is None else repr(name_of(type(field.default), choices))
