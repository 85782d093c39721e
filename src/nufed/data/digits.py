"""Handwritten digits, shipped with nufed."""

from __future__ import annotations

from importlib.resources import as_file, files

import numpy as np
import torch

from nufed.data.samples import Samples


def digits() -> Samples:
    """1,797 handwritten digits of 8×8 pixels, shipped with nufed (UCI, 10 classes).

    >>> samples = digits()
    >>> len(samples), samples.input_shape, samples.outputs
    (1797, (8, 8), 10)
    """
    with as_file(files("nufed.data") / "digits.npz") as path, np.load(path) as archive:
        images, labels = archive["images"], archive["labels"]
    return Samples(
        inputs=torch.from_numpy(images),
        targets=torch.from_numpy(labels).long(),
        classes=tuple(str(digit) for digit in range(10)),
        scale=1 / 16,
    )
