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
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from nufed.errors import InputError, in_short, shown

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
            found = entry.load()
        except Exception as error:  # importing the package may raise anything
            raise InputError(
                f"{name} is an entry point of {self.group} ({entry.value}) that can't be "
                f"imported: {in_short(error)}; repair or uninstall its package"
            ) from error
        return self._checked(found, f"{name}, an entry point of {self.group} ({entry.value}),")

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        yield from (name for name in installed().get(self.group, {}) if name not in self._built_in)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def working(self) -> dict[str, T]:
        """All objects by name, without entry points that can't be imported."""
        found = {}
        for name in self:
            with contextlib.suppress(InputError):
                found[name] = self[name]
        return found

    def find(self, key: str, name: str) -> T:
        """The object of a name; the module of a ``package.module:Name`` must be imported already.

        ``key`` is the configuration key of the name, for messages.
        """
        if name in self:
            return self[name]
        if not is_code(name):
            raise InputError(
                f"{key} = {shown(name)}: must be one of {self.listed()}" + suggest(name, self)
            )
        module, _, attribute = name.partition(":")
        if module not in sys.modules:
            raise InputError(
                f"{key} = {shown(name)} is not part of nufed and its module is not imported: "
                "import it first if you trust it"
            )
        found = vars(sys.modules[module]).get(attribute)
        if found is None:
            raise InputError(f"{key} = {shown(name)}: {module} has no {attribute}")
        return self._checked(found, f"{key} = {shown(name)}")

    def _checked(self, found: Any, what: str) -> T:
        reason = self._refuse(found)
        if reason:
            raise InputError(f"{what} {reason}")
        typed: T = found
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
    """Whether a name has the form ``package.module:Name``.

    >>> is_code("my.code:Mine"), is_code("gmeta"), is_code("a:../b")
    (True, False, False)
    """
    if not isinstance(name, str):
        return False
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(map(str.isidentifier, [*module.split("."), attribute]))


def import_named(key: str, name: str) -> Any:
    """Import ``package.module:Name``, with the working directory first on the path."""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # as `python -m` does
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing the user's module may raise anything
        raise InputError(
            f"{key} = {shown(name)} can't be imported ({in_short(error)}); modules are searched in "
            "the working directory, then in installed packages"
        ) from error


def suggest(given: str, known: Iterable[str]) -> str:
    """The closest known name, as the end of a sentence; empty if none is close."""
    name = closest(given, known)
    return "" if name is None else f"; did you mean {name!r}?"


def closest(given: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one most likely means; None if none is close.

    Close are names within 1 typing error, of at least 8 letters within 2, of at least 12 within 3;
    names that begin with the given one, and those that it continues with another word. Case and
    hyphens do not count.

    >>> closest("adapt_setps", ["adapt_steps", "trim"]), closest("optimizer", ["trim"])
    ('adapt_steps', None)
    """
    wanted, found = _folded(given), []
    for name in known:
        own = _folded(name)
        length = max(len(wanted), len(own))
        allowed = 0 if length < 3 else 1 if length < 8 else 2 if length < 12 else 3
        errors = _typing_errors(wanted, own) if len(wanted) <= MAX_MISSPELT else length
        begins = len(wanted) > 3 and own.startswith(wanted)
        continued = len(own) > 3 and wanted.startswith(f"{own}_")
        if errors <= allowed or begins or continued:
            found.append((errors, name))
    return min(found)[1] if found else None


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def _typing_errors(a: str, b: str) -> int:
    """Letters inserted, left out, replaced, or swapped with their neighbour."""
    before, row = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i in range(1, len(a) + 1):
        above, row, earlier = row, [i], before
        for j in range(1, len(b) + 1):
            least = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1]))
            if i > 1 and j > 1 and a[i - 2 : i] == b[j - 1] + b[j - 2]:
                least = min(least, earlier[j - 2] + 1)
            row.append(least)
        before = above
    return row[-1]
