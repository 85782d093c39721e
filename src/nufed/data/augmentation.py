"""Augmentation: random changes of the inputs of training batches.

An augmentation is a function ``augment(inputs, rng)`` of the inputs of one batch, as the model sees
them, and a NumPy generator; it returns inputs of the same shape and dtype. The generator follows
from the seed of the batch, so that every method, engine, worker and resumed run gets the same
changes. Batches of fine-tuning within training are changed, too; nothing is at evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nufed.data.samples import Samples, named_inputs
from nufed.errors import InputError, in_short
from nufed.objective import Inputs
from nufed.seeding import stream

Augmentation: TypeAlias = Callable[[Any, np.random.Generator], Any]


def augmented(augment: Augmentation, inputs: Inputs, seed: int) -> Inputs:
    """The inputs of the batch with this seed, changed; other shapes and dtypes are refused."""
    try:
        changed: Inputs = augment(inputs, stream(seed, "augment"))
        before, after = (
            {n: (x.shape, x.dtype) for n, x in named_inputs(each).items()}
            for each in (inputs, changed)
        )
    except InputError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise InputError(f"fails: {in_short(error)}", "data.augment") from error
    if before != after:
        raise InputError(
            f"must return inputs of the same shapes and types: it was given {_shapes(before)} and "
            f"returned {_shapes(after)}",
            "data.augment",
        )
    return changed


@dataclass(frozen=True)
class CropFlip:
    """Images moved by up to an eighth of their height, and mirrored with probability ½.

    Every image is padded by height // 8 pixels (at least 1) on each side with ``fill``, a window of
    its own size is cut out at random, and half of the windows are flipped left to right: of images
    of 32×32 pixels torchvision's ``RandomCrop(32, padding=4)`` and ``RandomHorizontalFlip()``.
    """

    fill: float = 0.0

    @classmethod
    def of(cls, samples: Samples) -> CropFlip:
        """For these samples, padded with black: what a byte of 0 becomes for the model."""
        images = samples.inputs
        if not isinstance(images, Tensor) or images.ndim not in (3, 4):
            raise InputError(
                '= "crop_flip": needs images as (height, width) or (channels, height, width), and '
                f"the data has shape {samples.input_shape}; remove it, or name your own as "
                "package.module:function",
                "data.augment",
            )
        return cls(samples.shift if images.dtype == torch.uint8 else 0.0)

    def __call__(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        (height, width), count = images.shape[-2:], len(images)
        pad = max(1, height // 8)
        top, left = rng.integers(2 * pad + 1, size=(2, count, 1))
        columns = left + np.arange(width)
        flipped = rng.random(count) < 0.5
        columns[flipped] = columns[flipped, ::-1]
        rows = torch.from_numpy(top + np.arange(height))
        padded = F.pad(images, (pad, pad, pad, pad), value=self.fill)
        planes = padded.reshape(count, -1, *padded.shape[-2:])
        image, plane = torch.arange(count), torch.arange(planes.shape[1])
        cut = planes[
            image[:, None, None, None],
            plane[:, None, None],
            rows[:, None, :, None],
            torch.from_numpy(columns)[:, None, None, :],
        ]
        return cut.reshape(images.shape)


AUGMENTATIONS: dict[str, Callable[[Samples], Augmentation]] = {"crop_flip": CropFlip.of}
"""Those that a configuration knows by name, each made for the samples of a run."""


def _shapes(shapes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {tuple(shape)} {dtype}" for name, (shape, dtype) in shapes.items())
