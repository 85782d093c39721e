"""Fully connected models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from nufed.errors import require

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "softplus": nn.Softplus}


def activation_of(name: str) -> type[nn.Module]:
    """The layer of an activation's name."""
    require(name in ACTIVATIONS, "activation", name, f"must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def logistic(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Logistic regression: one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), outputs))


def fcnn(
    input_shape: Sequence[int],
    outputs: int,
    hidden: Sequence[int] = (80, 60),
    activation: str = "relu",
) -> nn.Module:
    """Fully connected network; hidden layers of 80 and 60 units as in the paper.

    >>> fcnn((32, 32, 3), 10)[1]
    Linear(in_features=3072, out_features=80, bias=True)
    """
    activate = activation_of(activation)
    widths = [prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), activate()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))
