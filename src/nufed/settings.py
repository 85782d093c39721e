"""Settings: dataclass fields, each with a range and a one-line description.

The fields are the only place where settings are written. The configuration's schema, error
messages, ``nufed list NAME`` and the docs are made from them::

    @dataclass(frozen=True)
    class Ditto(Algorithm):
        weight: float = setting(1.0, "λ, weight of the proximal term", least=0)
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from inspect import get_annotations
from types import UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    Self,
    TypedDict,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from torch import Tensor

from nufed.errors import require

KEY = "nufed setting"


@dataclass(frozen=True)
class Search:
    """The range that ``nufed tune`` searches by default, with both ends.

    ``step_size``: it multiplies gradients of the loss, so that 2/L is a natural upper end where the
    smoothness L is known.
    """

    low: float
    high: float
    step_size: bool = False

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


STEP_SIZES = Search(1e-3, 1.0, step_size=True)


@dataclass(frozen=True)
class Setting:
    """Range and description of one field; type and default are the field's own.

    Args:
        about: one line, beginning with the paper's symbol where there is one.
        least, most: inclusive bounds.
        above, below: exclusive bounds.
        choices: for fields that hold an object with settings of its own (an aggregation rule, a
            curvature): its classes by name.
        search: what ``nufed tune`` searches by default; None: it leaves the setting as configured.
        follows: the setting whose value this one takes unless it is given itself.
        of_rounds: the default in a run, as a share of its rounds; the field's own is for code that
            knows no number of rounds.
        of_longest_step: the default in a run, as a share of the step size up to which the first
            steps lower the loss (:func:`nufed.meta.curvature.curvature_along`).
    """

    about: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: Mapping[str, type] | None = None
    search: Search | None = None
    follows: str | None = None
    of_rounds: float | None = None
    of_longest_step: float | None = None

    def allowed(self, whole: bool) -> str:
        """Text that states the allowed values."""
        limits = (
            ("{:g} or more", self.least),
            ("above {:g}", self.above),
            ("at most {:g}", self.most),
            ("below {:g}", self.below),
        )
        bounds = [text.format(limit) for text, limit in limits if limit is not None]
        kind = "a whole number" if whole else "a finite number"
        return kind + (f", {' and '.join(bounds)}" if bounds else "")

    @property
    def is_share(self) -> bool:
        """Whether it is bounded above, so that a logarithmic scale does not suit it."""
        return self.most is not None or self.below is not None

    def accepts(self, value: Any) -> bool:
        """Whether a number lies within the bounds."""
        return not (
            (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
            or (self.below is not None and value >= self.below)
            or not float("-inf") < value < float("inf")
        )


class Limits(TypedDict, total=False):
    """What a setting may have beside its default and description: see :class:`Setting`."""

    least: float
    above: float
    most: float
    below: float
    choices: Mapping[str, type]
    search: Search
    follows: str
    of_rounds: float
    of_longest_step: float


def setting(default: Any, about: str, **limits: Unpack[Limits]) -> Any:
    """A dataclass field that is a setting; further arguments are those of :class:`Setting`."""
    return dataclasses.field(default=default, metadata={KEY: Setting(about, **limits)})


@dataclass(frozen=True)
class Field:
    """One setting of a class: its name, type, default and description."""

    name: str
    type: Any
    default: Any
    setting: Setting

    @cached_property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a configuration can express; a tensor or an object is none of them."""
        union = get_origin(self.type) in (Union, UnionType)
        members = get_args(self.type) if union else (self.type,)
        return tuple(m for m in members if m in (bool, int, float, str) or _literals(m))

    def allowed(self) -> str:
        """Text that states the values allowed in a configuration, without "must be"."""
        if self.setting.choices is not None:
            return f"one of {', '.join(self.setting.choices)}"
        words = [f'"{word}"' for kind in self.kinds for word in _literals(kind)]
        texts = {bool: "true or false", str: "text"}
        words += [texts[kind] for kind in self.kinds if kind in texts]
        if int in self.kinds or float in self.kinds:
            words.append(self.setting.allowed(whole=float not in self.kinds))
        return " or ".join(words)

    def values(self) -> list[str]:
        """The names among the values allowed in a configuration."""
        if self.setting.choices is not None:
            return list(self.setting.choices)
        words = [str(word) for kind in self.kinds for word in _literals(kind)]
        return words + (["true", "false"] if bool in self.kinds else [])

    def check(self, value: Any, key: str = "") -> None:
        """Raise an :class:`~nufed.errors.InputError` unless the setting may have this value.

        ``key`` is what it is called in the error, by default its name.
        Of values that only Python can pass (a tensor, an object) just a tensor's range is checked;
        the rest is up to the class.
        """
        if isinstance(value, Tensor):
            ends = (float(value.min()), float(value.max())) if value.numel() else ()
            ok = all(map(self.setting.accepts, ends))
        else:
            ok = self.setting.choices is not None or not self.kinds or self._accepts(value)
        if not ok:
            require(ok, key or self.name, value, f"must be {self.allowed()}")

    def _accepts(self, value: Any) -> bool:
        words = [word for kind in self.kinds for word in _literals(kind)]
        if any(type(value) is type(word) and value == word for word in words):
            return True
        if isinstance(value, bool):
            return bool in self.kinds
        if isinstance(value, int | float):
            whole = isinstance(value, int) and int in self.kinds
            number = float in self.kinds and abs(value) <= sys.float_info.max
            return (whole or number) and self.setting.accepts(value)
        return (isinstance(value, str) and str in self.kinds) or (
            value is None and self.default is None
        )


def _literals(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


class RemembersSettings:
    """Base of dataclasses that remember which settings they were made with."""

    _explicit: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        made = super().__new__(cls)
        names = (f.name for f in dataclasses.fields(cls) if f.init and not f.kw_only)  # type: ignore[arg-type]
        given = {*settings, *(name for name, _ in zip(names, args, strict=False))}
        if given:
            object.__setattr__(made, "_explicit", frozenset(given))
        return made


def explicit_settings(thing: RemembersSettings) -> frozenset[str]:
    """The settings that an object was made with, which ``[method]`` does not change."""
    return thing._explicit


def settings_of(cls: type) -> tuple[Field, ...]:
    """The settings of a dataclass: its own first, then those of its bases.

    Fields that the class fixes (``init=False``) are excluded.
    """
    return _settings_of(cls)


@lru_cache(maxsize=256)  # resolving type hints is slow, and every new algorithm is checked
def _settings_of(cls: Any) -> tuple[Field, ...]:
    hints = get_type_hints(cls)
    values = {
        field.name: Field(field.name, hints[field.name], field.default, field.metadata[KEY])
        for field in dataclasses.fields(cls)
        if field.init and KEY in field.metadata
    }
    written = [name for base in cls.__mro__ for name in get_annotations(base)]
    return tuple(values[name] for name in dict.fromkeys(written) if name in values)


def follow_settings(thing: RemembersSettings) -> None:
    """Give every setting that was not given itself the value of the one that it follows."""
    for field in settings_of(type(thing)):
        shared = field.setting.follows
        if shared is not None and field.name not in thing._explicit:
            object.__setattr__(thing, field.name, getattr(thing, shared))


def check_settings(algorithm: Any) -> None:
    """Raise an :class:`~nufed.errors.InputError` for the first setting out of its range."""
    for field in settings_of(type(algorithm)):
        field.check(getattr(algorithm, field.name))


def text_of(field: Field, value: Any) -> str:
    """A setting's value as text; an object as its name in a configuration and its settings."""
    if isinstance(value, Tensor):
        return f"{value.numel()} numbers"
    if isinstance(value, float):
        return f"{value:g}"
    choices = field.setting.choices
    if choices is None:
        return str(value)
    name = next((n for n, cls in choices.items() if cls is type(value)), type(value).__name__)
    inner = [f"{f.name} {text_of(f, getattr(value, f.name))}" for f in settings_of(type(value))]
    return ", ".join([name, *inner])
