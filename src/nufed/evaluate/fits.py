"""Curves of fitted models, for regression on one number: what fine-tuning does to a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from nufed.algorithms.protocol import Algorithm, State
from nufed.data import Federation, Samples
from nufed.evaluate.scores import evaluation_context, outputs_of
from nufed.objective import Objective
from nufed.server import Downlink

POINTS = 81  # of a curve
AGENTS = 3  # whose curves are recorded: newcomers if there are any

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


def can_be_drawn(samples: Samples) -> bool:
    """Whether models on this data are curves: one number in, one number out."""
    return not samples.classes and samples.input_shape == (1,) and samples.outputs == 1


def fits(
    algorithm: Algorithm,
    objective: Objective,
    federation: Federation,
    received: State,
    state: Callable[[int], State | None],
    *,
    seed: int,
    steps: int,
    scale: Callable[[int], float],
) -> tuple[Fit, ...]:
    """The curves of the first unseen agents; without any, of the first seen ones.

    Args:
        algorithm, objective, federation, received, seed: as for evaluation.
        state: an agent's state.
        steps: maximum number of fine-tuning steps.
        scale: of the step size of fine-tuning, by the number of steps.
    """
    inputs = federation.samples.inputs
    assert isinstance(inputs, torch.Tensor)
    ends = float(inputs.min()), float(inputs.max())
    grid = torch.linspace(*ends, POINTS).view(-1, 1).to(objective.initial())  # dtype and device
    scales = sorted({scale(s) for s in range(steps + 1)})
    split, made = federation.split, []
    for agent in (split.unseen or split.seen)[:AGENTS]:
        batches = federation.batches(agent, seed, "evaluate")
        outputs = outputs_of(
            algorithm,
            evaluation_context(federation, objective, batches, batches.samples),
            Downlink.of(received).to(agent),
            state(agent),
            lambda predict, tensors: predict(tensors, grid),
            steps=steps,
            scales=scales,
        )
        curves = [outputs.personal[scales.index(scale(s))][s] for s in range(steps + 1)]
        rows = {"train": split.train[agent], "test": split.test[agent]}
        samples = {
            f"{part}_{kind}": _numbers(tensor[part_rows])
            for part, part_rows in rows.items()
            for kind, tensor in (("inputs", inputs), ("targets", federation.samples.targets))
        }
        predicted = tuple(_numbers(curve) for curve in curves)
        name, seen = split.names[agent], agent not in split.unseen
        made.append(Fit(agent, name, seen, _numbers(grid), predicted, **samples))
    return tuple(made)


def _numbers(values: torch.Tensor | Sequence[float]) -> Curve:
    return tuple(torch.as_tensor(values).flatten().tolist())
