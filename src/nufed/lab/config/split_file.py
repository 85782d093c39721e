"""The file of a split: a recipe, or every agent's rows, sealed with its SHA-256."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nufed.data import Split
from nufed.data.partition import DirichletReusing, Rows
from nufed.data.split import PARTS, lazy_split
from nufed.errors import InputError
from nufed.lab.files import seal, unseal


def split_bytes(split: Split) -> bytes:
    """The content of a split's file (safetensors)."""
    about, arrays = split.contents()
    return b"".join(seal(about, {name: torch.from_numpy(array) for name, array in arrays.items()}))


def load_split(path: str | Path, labels: Rows | None = None) -> Split:
    """Read a split; a file that differs in any byte from :func:`split_bytes` is refused.

    A split that was saved as a recipe is rebuilt from the data's ``labels``. Refused are also
    splits that would train on test data and, if ``labels`` are given, rows outside of the data.
    """
    try:
        content = Path(path).read_bytes()
        sealed = unseal(content)
        split = _unpacked(sealed.about, {n: t.numpy() for n, t in sealed.tensors.items()}, labels)
        unchanged = split_bytes(split) == content
    except Exception as error:  # a damaged file may raise anything
        raise InputError(f"{path} can't be read as a split: {error}") from error
    if not unchanged:
        raise InputError(
            f"{path} is damaged, or made for other data: this split does not match its SHA-256"
        )
    try:
        split.check(None if labels is None else len(labels))
    except InputError as error:
        raise InputError(f"{path} can't be used as a split: {error}") from None
    return split


def _unpacked(about: dict[str, Any], arrays: dict[str, Rows], labels: Rows | None) -> Split:
    unseen = tuple(map(int, about["unseen"]))
    if "recipe" in about:
        if labels is None:
            raise InputError("it is saved as a recipe: give the labels of its data")
        recipe = {k: v for k, v in about["recipe"].items() if k != "labels_sha256"}
        return lazy_split(DirichletReusing(labels, **recipe), unseen)
    train, validation, test = (_rows(arrays[p], arrays[p + "_sizes"]) for p in PARTS)
    return Split(train, validation, test, tuple(map(str, about["names"])), unseen)


def _rows(rows: Rows, sizes: Rows) -> list[np.ndarray[Any, Any]]:
    if rows.ndim != 1 or sizes.ndim != 1:
        raise InputError("rows must be in one dimension")
    return np.split(rows, np.cumsum(sizes)[:-1])
