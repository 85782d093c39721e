"""The models that nufed can build by name, for data of a given shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

from torch import nn

from nufed.errors import InputError, require


def logistic(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Logistic regression: one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), outputs))


ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "softplus": nn.Softplus}


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
    allowed = f"must be one of {', '.join(ACTIVATIONS)}"
    require(activation in ACTIVATIONS, "activation", activation, allowed)
    widths = [prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def cnn(
    input_shape: Sequence[int], outputs: int, channels: Sequence[int] = (16, 32), groups: int = 4
) -> nn.Module:
    """Convolutional network with GroupNorm, for images as (channels, height, width)."""
    if len(input_shape) == 2:
        input_shape = (1, *input_shape)
    if len(input_shape) != 3:
        raise InputError(
            f"model cnn needs images as (height, width) or (channels, height, width), and the data "
            f"has shape {tuple(input_shape)}: use fcnn"
        )
    layers: list[nn.Module] = [nn.Flatten(), nn.Unflatten(1, tuple(input_shape))]
    widths = [input_shape[0], *channels]
    for before, after in pairwise(widths):
        layers += [
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(groups, after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    height, width = (side // 2 ** len(channels) for side in input_shape[1:])
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * height * width, outputs))


MODELS: dict[str, Callable[..., nn.Module]] = {"fcnn": fcnn, "cnn": cnn, "logistic": logistic}
