"""Attacks: what corrupt agents of a simulation send in place of their honest vectors.

An attack is a function ``(vector, before, rng)`` of the honest vector, the vector that the agent
received, and a random stream. The first line of its docstring describes it in ``nufed list``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from nufed.seeding import torch_seed

Attack: TypeAlias = Callable[[Tensor, Tensor, np.random.Generator], Tensor]

FACTOR = 10.0  # norm of the change that scale and gaussian send / norm of the honest change


def sign_flip(vector: Tensor, before: Tensor, rng: np.random.Generator) -> Tensor:
    """the change of the model with its sign flipped"""
    return before - (vector - before)


def scale(vector: Tensor, before: Tensor, rng: np.random.Generator) -> Tensor:
    """ten times the change"""
    return before + FACTOR * (vector - before)


def gaussian(vector: Tensor, before: Tensor, rng: np.random.Generator) -> Tensor:
    """noise with ten times the norm of the change"""
    generator = torch.Generator().manual_seed(torch_seed(rng))
    noise = torch.randn(vector.shape, generator=generator, dtype=torch.float64)
    length = FACTOR * (vector - before).double().norm() / noise.norm()
    sent: Tensor = before + (noise * length).to(vector)
    return sent


def nan(vector: Tensor, before: Tensor, rng: np.random.Generator) -> Tensor:
    """non-finite numbers"""
    return torch.full_like(vector, float("nan"))


def labels(vector: Tensor, before: Tensor, rng: np.random.Generator) -> Tensor:
    """an honest update from training samples with wrong classes"""
    return vector  # the simulation changes the samples


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack for attack in (sign_flip, scale, gaussian, nan, labels)
}
