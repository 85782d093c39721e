"""The data source ``file``: a user's own table, arrays or images to train on."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nufed.data.data_file import LABEL, read_data
from nufed.data.sample_table import Data
from nufed.data.samples import Samples, as_samples
from nufed.errors import InputError, require


def own_file(
    path: str = "",
    label: str = LABEL,
    owner: str | None = None,
    targets: str | None = None,
    regression: bool | None = None,
    scale: float | None = None,
    size: Sequence[int] | None = None,
) -> Samples:
    """Your own CSV, Parquet, NPZ or NPY file, or folder of images: data.args.path.

    Args:
        path: as for :func:`nufed.data.data_file.read_data`.
        label: the column of labels.
        owner: the column that names the agent of a sample; by default samples are dealt out.
        targets: a ``.npy`` with the targets of a ``.npy``.
        regression: whether labels are numbers to predict; by default whether some have fractions.
        scale: for whole numbers 0 … 255: stored as bytes, which models see multiplied by it;
            images by default with 1/255.
        size: height and width that images are resized to; by default all must have one size.
    """
    texts = {"path": path, "label": label, "owner": owner, "targets": targets}
    for name, value in texts.items():
        is_text = isinstance(value, str) or (value is None and name not in ("path", "label"))
        require(is_text, f"data.args.{name}", value, "must be text")
    require(bool(path), "data.args.path", path, "must name a file, or a folder of images")
    shape = None if size is None else _image_shape(Path(path), size)
    further = None if targets is None else Path(targets)
    found = read_data(Path(path), label, owner=owner, targets=further, shape=shape)
    inputs: Any = torch.from_numpy(np.ascontiguousarray(found.inputs))
    samples = as_samples((inputs, _targets(found, regression), found.owners))
    if scale is None and not found.images:
        return samples
    if not found.images:
        inputs = _bytes(inputs)
    scale = 1 / 255 if scale is None else float(scale)
    return Samples(inputs, samples.targets, samples.classes, samples.owners, scale=scale)


def _image_shape(folder: Path, size: Sequence[int]) -> tuple[int, ...]:
    whole = isinstance(size, Sequence) and all(isinstance(x, int) and x > 0 for x in size)
    name = "data.args.size"
    require(whole and len(size) == 2, name, size, "must be [height, width] of images")
    require(folder.is_dir(), name, size, f"is for a folder of images, which {folder} is not")
    return (3, *size)


def _targets(found: Data, regression: bool | None) -> Any:
    """Class names, class numbers or numbers to predict."""
    labels = found.labels
    if isinstance(labels, np.ndarray):
        return labels.astype(float) if regression else labels
    assert labels is not None
    numbers = [_number(word) for word in labels]
    if regression is None:
        regression = None not in numbers and not all(float(x).is_integer() for x in numbers if x)
    if not regression:
        return labels
    if None in numbers:
        place = numbers.index(None)
        raise InputError(
            f"data.args.regression = true: the label {labels[place]!r} of sample {place} (counted "
            "from 0) is not a finite number"
        )
    return np.array(numbers, dtype=float)


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if isfinite(number) else None


def _bytes(inputs: torch.Tensor) -> torch.Tensor:
    stored = inputs.to(torch.uint8)
    if not bool((stored == inputs).all()):
        low, high = inputs.aminmax()
        raise InputError(
            "data.args.scale is for whole numbers in 0 … 255, and inputs range from "
            f"{float(low):g} to {float(high):g}: remove it"
        )
    return stored
