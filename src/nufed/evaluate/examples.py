"""What fine-tuning does to the models of single agents, as records that a page can draw.

For regression on one number these are curves (:class:`Fit`), for small images guesses on some of
them (:class:`Guesses`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from nufed.algorithms.protocol import Algorithm, State
from nufed.data import Federation, Samples
from nufed.evaluate.scores import evaluation_context, outputs_of
from nufed.objective import Inputs, Objective
from nufed.server import Downlink

POINTS = 81  # of a curve
AGENTS = 3  # whose models are recorded
IMAGES = 4  # of each, of different classes
SIDES = range(12, 33)  # pixels of images that can be recognised, and are small

Curve: TypeAlias = tuple[float, ...]


@dataclass(frozen=True)
class Fit:
    """One agent's model on a grid of inputs, and the agent's samples.

    ``predicted`` holds the outputs of the personal model after 0, 1, … fine-tuning steps, with the
    step sizes that results show.
    """

    agent: int
    name: str
    seen: bool
    grid: Curve
    predicted: tuple[Curve, ...]
    train_inputs: Curve
    train_targets: Curve
    test_inputs: Curve
    test_targets: Curve


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


def can_be_drawn(samples: Samples) -> bool:
    """Whether models on this data are curves: one number in, one number out."""
    return not samples.classes and samples.input_shape == (1,) and samples.outputs == 1


def can_be_guessed(samples: Samples) -> bool:
    """Whether samples are small images with classes."""
    shape = samples.input_shape
    small = len(shape) == 2 and all(side in SIDES for side in shape)
    return bool(samples.classes) and isinstance(samples.inputs, Tensor) and small


@dataclass(frozen=True)
class Examples:
    """A trained method, of whose models examples are recorded.

    Args:
        algorithm, objective, federation, received, seed: as for evaluation.
        state: an agent's state.
        steps: maximum number of fine-tuning steps.
        scale: of the step size of fine-tuning, by the number of steps.
    """

    algorithm: Algorithm
    objective: Objective
    federation: Federation
    received: State
    state: Callable[[int], State | None]
    seed: int
    steps: int
    scale: Callable[[int], float]

    def fits(self) -> tuple[Fit, ...]:
        """The curves of the first unseen agents; without any, of the first seen ones."""
        samples, split = self.federation.samples, self.federation.split
        inputs = samples.inputs
        if not can_be_drawn(samples) or not isinstance(inputs, Tensor):
            return ()
        ends = float(inputs.min()), float(inputs.max())
        grid = torch.linspace(*ends, POINTS).view(-1, 1).to(self.objective.initial())
        made = []
        for agent in (split.unseen or split.seen)[:AGENTS]:
            of_agent = {
                f"{part}_{kind}": _numbers(tensor[rows])
                for part, rows in (("train", split.train[agent]), ("test", split.test[agent]))
                for kind, tensor in (("inputs", inputs), ("targets", samples.targets))
            }
            predicted = tuple(map(_numbers, self._outputs(agent, grid)))
            name, seen = split.names[agent], agent not in split.unseen
            made.append(Fit(agent, name, seen, _numbers(grid), predicted, **of_agent))
        return tuple(made)

    def guesses(self) -> tuple[Guesses, ...]:
        """The guesses of a few newcomers, evenly spread over all of them."""
        samples, split = self.federation.samples, self.federation.split
        if not can_be_guessed(samples):
            return ()
        height, width = samples.input_shape
        apart, made = max(1, len(split.unseen) // AGENTS), []
        for agent in split.unseen[::apart][:AGENTS]:
            classes, first = _first_of_each(samples.targets, split.train[agent].tolist())
            labels, asked = _first_of_each(samples.targets, split.test[agent].tolist())
            labels, asked = labels[:IMAGES], asked[:IMAGES]
            inputs, _ = self.federation.take(np.array(asked))
            outputs = self._outputs(agent, inputs)
            made.append(
                Guesses(
                    agent,
                    split.names[agent],
                    (height, width),
                    _pixels(samples, asked),
                    labels,
                    _pixels(samples, first),
                    classes,
                    tuple(tuple(each.argmax(dim=1).tolist()) for each in outputs),
                )
            )
        return tuple(made)

    def _outputs(self, agent: int, inputs: Inputs) -> list[Tensor]:
        """The outputs of an agent's personal model after 0, 1, … fine-tuning steps."""
        batches = self.federation.batches(agent, self.seed, "evaluate")
        context = evaluation_context(self.federation, self.objective, batches, batches.samples)
        scales = [self.scale(steps) for steps in range(self.steps + 1)]
        tried = sorted(set(scales))
        outputs = outputs_of(
            self.algorithm,
            context,
            Downlink.of(self.received).to(agent),
            self.state(agent),
            lambda predict, tensors: predict(tensors, inputs),
            self.steps,
            tried,
        )
        return [outputs.personal[tried.index(scale)][s] for s, scale in enumerate(scales)]


def _first_of_each(targets: Tensor, rows: list[int]) -> tuple[tuple[int, ...], list[int]]:
    """The classes of these rows in their order, and the first row of each."""
    first: dict[int, int] = {}
    for row in rows:
        first.setdefault(int(targets[row]), row)
    classes = tuple(sorted(first))
    return classes, [first[each] for each in classes]


def _pixels(samples: Samples, rows: list[int]) -> tuple[str, ...]:
    """Images as bytes, 255 for the largest number in any of them."""
    assert isinstance(samples.inputs, Tensor)
    images = samples.inputs[rows].double()
    low, high = float(images.min()), float(images.max())
    bytes_ = ((images - low) * (255 / ((high - low) or 1))).round().to(torch.uint8)
    return tuple(bytes(image.flatten().tolist()).hex() for image in bytes_)


def _numbers(values: Tensor | Sequence[float]) -> Curve:
    return tuple(torch.as_tensor(values).flatten().tolist())
