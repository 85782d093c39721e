"""Guesses on small images before and after fine-tuning: what it does to a classifier.

The records are what a page needs to draw them, with an image of every class that may be guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nufed.algorithms.protocol import Algorithm, State
from nufed.data import Federation, Samples
from nufed.evaluate.scores import Predict, evaluation_context, outputs_of
from nufed.objective import Inputs, Objective
from nufed.server import Downlink

AGENTS = 3  # newcomers whose guesses are recorded
IMAGES = 4  # of each, of different classes
SIDES = range(12, 33)  # pixels of images that can be recognised, and are small


@dataclass(frozen=True)
class Guesses:
    """One newcomer's guesses on a few of its test images.

    Args:
        agent, name: which one.
        sides: height and width of an image.
        images: the test images, each a byte per pixel in hexadecimal digits.
        labels: their classes.
        examples: one training image of every class in ``classes``.
        classes: the classes that the agent's training part has.
        guessed: the guess on every image after 0, 1, … fine-tuning steps.
    """

    agent: int
    name: str
    sides: tuple[int, int]
    images: tuple[str, ...]
    labels: tuple[int, ...]
    examples: tuple[str, ...]
    classes: tuple[int, ...]
    guessed: tuple[tuple[int, ...], ...]


def can_be_guessed(samples: Samples) -> bool:
    """Whether samples are small images with classes."""
    shape = samples.input_shape
    small = len(shape) == 2 and all(side in SIDES for side in shape)
    return bool(samples.classes) and isinstance(samples.inputs, Tensor) and small


def guesses(
    algorithm: Algorithm,
    objective: Objective,
    federation: Federation,
    received: State,
    *,
    seed: int,
    steps: int,
    scale: Callable[[int], float],
) -> tuple[Guesses, ...]:
    """Of a few newcomers, evenly spread over all of them; none if there are none.

    Arguments are those of :func:`nufed.evaluate.fits.fits`.
    """
    split, made = federation.split, []
    scales = sorted({scale(s) for s in range(steps + 1)})
    apart = max(1, len(split.unseen) // AGENTS)
    for agent in split.unseen[::apart][:AGENTS]:
        targets = federation.samples.targets
        classes, first = _first_of_each(targets, split.train[agent].tolist())
        labels, asked = _first_of_each(targets, split.test[agent].tolist())
        labels, asked = labels[:IMAGES], asked[:IMAGES]
        inputs, _ = federation.take(np.array(asked))
        batches = federation.batches(agent, seed, "evaluate")
        outputs = outputs_of(
            algorithm,
            evaluation_context(federation, objective, batches, batches.samples),
            Downlink.of(received).to(agent),
            None,
            partial(_answer, inputs=inputs),
            steps=steps,
            scales=scales,
        )
        every = [outputs.personal[scales.index(scale(s))][s] for s in range(steps + 1)]
        made.append(
            Guesses(
                agent,
                split.names[agent],
                _sides(federation.samples),
                _pixels(federation.samples, asked),
                labels,
                _pixels(federation.samples, first),
                classes,
                tuple(tuple(each.argmax(dim=1).tolist()) for each in every),
            )
        )
    return tuple(made)


def _answer(predict: Predict, tensors: State, *, inputs: Inputs) -> Tensor:
    return predict(tensors, inputs)


def _first_of_each(targets: Tensor, rows: list[int]) -> tuple[tuple[int, ...], list[int]]:
    """The classes of these rows in their order, and the first row of each."""
    first: dict[int, int] = {}
    for row in rows:
        first.setdefault(int(targets[row]), row)
    classes = tuple(sorted(first))
    return classes, [first[each] for each in classes]


def _sides(samples: Samples) -> tuple[int, int]:
    height, width = samples.input_shape
    return height, width


def _pixels(samples: Samples, rows: list[int]) -> tuple[str, ...]:
    """Images as bytes, 255 for the largest number in any of them."""
    assert isinstance(samples.inputs, Tensor)
    images = samples.inputs[rows].double()
    low, high = float(images.min()), float(images.max())
    bytes_ = ((images - low) * (255 / ((high - low) or 1))).round().to(torch.uint8)
    return tuple(bytes(image.flatten().tolist()).hex() for image in bytes_)
