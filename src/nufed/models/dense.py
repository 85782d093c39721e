"""Fully connected models, also with an exit after each hidden layer, as ScaleFL needs them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn

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


class MultiExit(nn.Module):
    """A network with an exit after each stage; its outputs are those of the last exit.

    A module of one's own has exits if it has the same two attributes and the same forward pass.

    Args:
        stages: each takes the features of the one before it; the first one, the inputs.
        exits: exit j makes outputs of the features of stage j.
    """

    draws_nothing = True  # its layers may

    def __init__(self, stages: Sequence[nn.Module], exits: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages, self.exits = nn.ModuleList(stages), nn.ModuleList(exits)

    def forward(self, features: Tensor) -> Tensor:
        for stage in self.stages:
            features = stage(features)
        outputs: Tensor = self.exits[-1](features)
        return outputs


def multi_exit(
    input_shape: Sequence[int],
    outputs: int,
    hidden: Sequence[int] = (64, 64, 64, 64),
    activation: str = "relu",
) -> nn.Module:
    """Fully connected network with an exit after each hidden layer, as ScaleFL needs it.

    >>> [leave.in_features for leave in multi_exit((8, 8), 10, hidden=(40, 30)).exits]
    [40, 30]
    """
    layer = activation_of(activation)
    require(len(hidden) > 0, "hidden", hidden, "must have at least one layer")
    stages = [
        nn.Sequential(nn.Flatten(), nn.Linear(wide, narrow), layer())
        for wide, narrow in pairwise([prod(input_shape), *hidden])
    ]
    return MultiExit(stages, [nn.Linear(width, outputs) for width in hidden])
