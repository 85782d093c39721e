"""Resolves names in a configuration: built-in, entry points, and ``package.module:Name``.

An installed package adds a name through an entry point of the registry's group, for example in its
``pyproject.toml``::

    [project.entry-points."nufed.algorithms"]
    mine = "my_package.mine:Mine"
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from nufed.errors import InputError, in_short, shown

SIMILAR = 0.75  # the least similarity of a misspelt name, in 0 … 1
MAX_MISSPELT = 100  # letters of a name that is compared with known ones
T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Objects by name: built-in ones and entry points, which are loaded on access.

    Args:
        built_in: nufed's own, by name.
        group: the group of entry points.
        kind: the kind of object, for messages: ``"Class"`` or ``"function"``.
        refuse: returns why an object can't be used, as the end of a sentence; None if it can.
    """

    def __init__(
        self,
        built_in: Mapping[str, T],
        group: str,
        kind: str,
        refuse: Callable[[Any], str | None],
    ) -> None:
        self._built_in, self.group, self._kind, self._refuse = built_in, group, kind, refuse

    def __getitem__(self, name: str) -> T:
        if name in self._built_in:
            return self._built_in[name]
        entry = installed()[self.group][name]
        try:
            loaded = entry.load()
        except Exception as error:  # importing the package may raise anything
            raise InputError(
                f"{name} is an entry point of {self.group} ({entry.value}) that can't be "
                f"imported: {in_short(error)}; repair or uninstall its package"
            ) from error
        return self._checked(loaded, f"{name}, an entry point of {self.group} ({entry.value}),")

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        yield from (name for name in installed().get(self.group, {}) if name not in self._built_in)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def working(self) -> dict[str, T]:
        """All objects by name, without entry points that can't be imported."""
        objects = {}
        for name in self:
            with contextlib.suppress(InputError):
                objects[name] = self[name]
        return objects

    def find(self, key: str, name: str) -> T:
        """The object of a name; the module of a ``package.module:Name`` must be imported already.

        ``key`` is the configuration key of the name, for messages.
        """
        if name in self:
            return self[name]
        if not is_code(name):
            raise InputError(
                f"= {shown(name)}: must be one of {self.listed()}" + suggest(name, self), key
            )
        module, _, attribute = name.partition(":")
        if module not in sys.modules:
            raise InputError(
                f"= {shown(name)} is not part of nufed and its module is not imported: import it "
                "first if you trust it",
                key,
            )
        named = vars(sys.modules[module]).get(attribute)
        if named is None:
            raise InputError(f"= {shown(name)}: {module} has no {attribute}", key)
        return self._checked(named, f"= {shown(name)}", key)

    def _checked(self, candidate: Any, what: str, key: str = "") -> T:
        reason = self._refuse(candidate)
        if reason:
            raise InputError(f"{what} {reason}", key)
        typed: T = candidate
        return typed

    def listed(self) -> str:
        """All names, and the form of a user's own, for messages."""
        return f"{', '.join(self)}, or your own as package.module:{self._kind}"


@cache  # scanning all packages takes tens of milliseconds
def installed() -> dict[str, dict[str, EntryPoint]]:
    """The entry points of nufed's groups, by group and name."""
    every = entry_points()
    groups = sorted(group for group in every.groups if group.startswith("nufed."))
    return {g: {entry.name: entry for entry in sorted(every.select(group=g))} for g in groups}


def is_code(name: object) -> bool:
    """Whether a name has the form ``package.module:Name``; ``hf:`` begins names at Hugging Face.

    >>> is_code("my.code:Mine"), is_code("gmeta"), is_code("a:../b")
    (True, False, False)
    """
    if not isinstance(name, str):
        return False
    module, colon, attribute = name.partition(":")
    return (
        bool(colon)
        and module != "hf"
        and all(map(str.isidentifier, [*module.split("."), attribute]))
    )


def import_named(key: str, name: str) -> Any:
    """Import ``package.module:Name``, with the working directory first on the path."""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # as `python -m` does
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing the user's module may raise anything
        raise InputError(
            f"= {shown(name)} can't be imported ({in_short(error)}); modules are searched in the "
            "working directory, then in installed packages",
            key,
        ) from error


def suggest(given: str, known: Iterable[str]) -> str:
    """The closest known name, as the end of a sentence; empty if none is close."""
    name = closest(given, known)
    return "" if name is None else f"; did you mean {name!r}?"


def closest(given: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one most likely means; None if none is close.

    Close are similar names (:mod:`difflib`), names that begin with the given one, and those that it
    continues with another word. Case and hyphens do not count.

    >>> closest("adapt_setps", ["adapt_steps", "trim"]), closest("optimizer", ["trim"])
    ('adapt_steps', None)
    """
    wanted, names = _folded(given), {_folded(name): name for name in known}
    related = [
        name
        for name in names
        if (len(wanted) > 3 and name.startswith(wanted))
        or (len(name) > 3 and wanted.startswith(f"{name}_"))
    ]
    near = (
        get_close_matches(wanted, names, n=1, cutoff=SIMILAR) if len(wanted) < MAX_MISSPELT else []
    )
    return names[(near or sorted(related))[0]] if near or related else None


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")
