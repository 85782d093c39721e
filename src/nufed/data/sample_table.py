"""What readers of users' files share: the samples, and the columns of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nufed.errors import InputError, shown
from nufed.registry import suggest

FIRST = 4  # columns named in a message, and the last


class Data(NamedTuple):
    """Inputs, one per row, their labels and owners, if any; of images the names of the files."""

    inputs: np.ndarray[Any, Any]
    labels: Sequence[str] | np.ndarray[Any, Any] | None
    owners: Sequence[str] | None = None
    images: Sequence[str] = ()


class Places(NamedTuple):
    """The columns of labels and owners."""

    label: int | None
    owner: int | None

    def features(self, columns: int) -> list[int]:
        """The other columns."""
        return [place for place in range(columns) if place not in self]


def places_of(header: Sequence[str], label: str, owner: str | None, labelled: bool) -> Places:
    """Where labels and owners are; a missing or repeated column is refused."""
    for name, needed in ((label, labelled), (owner, owner is not None)):
        if header.count(str(name)) > 1:
            raise InputError(f"it has {header.count(str(name))} columns {shown(name)}: give one")
        if needed and name not in header:
            some = [*header[:FIRST], "…", header[-1]] if len(header) > FIRST + 1 else header
            option = "--label or data.args.label" if name == label else "data.args.owner"
            raise InputError(
                f"it has no column {shown(name)} (its first line is {', '.join(map(shown, some))}):"
                f" name the columns in the first line, or name another column with {option}"
                + suggest(str(name), header)
            )
    place = {name: place for place, name in enumerate(header)}
    return Places(place.get(label), None if owner is None else place[owner])
