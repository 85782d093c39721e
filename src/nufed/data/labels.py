"""Labels that are text: names of classes, and their numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nufed.errors import InputError, shown

LISTED = 12  # classes named in a message


def as_words(targets: Any) -> list[str] | None:
    """Targets that are text, as a list; None for numbers. Missing and empty labels are refused.

    A list is not made an array, whose items would all have the longest size.
    """
    if not isinstance(targets, list | tuple):
        array = np.asarray(targets)
        if array.ndim != 1 or array.dtype.kind not in "USOT":
            return None
        targets = array.tolist()
    words = [target.decode() if isinstance(target, bytes) else target for target in targets]
    if not any(isinstance(word, str) for word in words):
        return None
    for place, word in enumerate(words):
        if not isinstance(word, str) or not word.strip():
            raise InputError(
                f"the target of sample {place} (counted from 0) is {shown(word)}, and others are "
                "text: give every sample the name of its class"
            )
    return [str(word) for word in words]


def class_names(words: Sequence[str]) -> tuple[str, ...]:
    """The names of the classes in their order: of the alphabet, or if all are whole numbers theirs.

    >>> class_names(["b", "a", "b"]), class_names(["10", "9"])
    (('a', 'b'), ('9', '10'))
    """
    names = set(words)
    numbers = all(re.fullmatch("-?[0-9]{1,18}", name) for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if numbers else 0, name)))


def class_numbers(words: Sequence[str], classes: Sequence[str]) -> Tensor:
    """The numbers of classes by their names; an unknown name is refused."""
    numbers = {name: number for number, name in reversed(list(enumerate(classes)))}
    for place, word in enumerate(words):
        if word not in numbers:
            raise InputError(
                f"unknown label {shown(word)} of sample {place} (counted from 0): the classes are "
                f"{listed(classes)}"
            )
    return torch.tensor([numbers[word] for word in words])


def listed(classes: Sequence[str]) -> str:
    """The names of the classes, or the first of many, for a message."""
    names = ", ".join(classes[:LISTED])
    return names if len(classes) <= LISTED else f"{names}, … ({len(classes)} in all)"
