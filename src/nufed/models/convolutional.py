"""Convolutional models, for images as (height, width) or (channels, height, width).

None has BatchNorm, whose running statistics averaging over agents would corrupt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from nufed.errors import InputError, require
from nufed.models.dense import activation_of


def cnn(
    input_shape: Sequence[int],
    outputs: int,
    channels: Sequence[int] = (32, 64),
    hidden: int = 512,
    activation: str = "relu",
) -> nn.Module:
    """The CNN of McMahan et al. (2017): two 5×5 convolutions of 32 and 64 channels, 512 units.

    A 2×2 max pooling follows each convolution, whose padding keeps the size. 1,663,370 parameters
    for MNIST, as in the paper.

    >>> sum(p.numel() for p in cnn((28, 28), 10).parameters())
    1663370
    """
    shape = _image_shape("cnn", input_shape, 2 ** len(channels))
    activate = activation_of(activation)
    layers = _images(shape)
    for before, after in pairwise([shape[0], *channels]):
        layers += [nn.Conv2d(before, after, 5, padding=2), activate(), nn.MaxPool2d(2)]
    height, width = (side // 2 ** len(channels) for side in shape[1:])
    features = [shape[0], *channels][-1] * height * width
    layers += [nn.Flatten(), nn.Linear(features, hidden), activate()]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


def cnn_groupnorm(
    input_shape: Sequence[int], outputs: int, channels: Sequence[int] = (16, 32), groups: int = 4
) -> nn.Module:
    """Small CNN with GroupNorm: 3×3 convolutions, each followed by a 2×2 max pooling."""
    shape = _image_shape("cnn_groupnorm", input_shape, 2 ** len(channels))
    layers = _images(shape)
    widths = [shape[0], *channels]
    for before, after in pairwise(widths):
        layers += [
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(groups, after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    height, width = (side // 2 ** len(channels) for side in shape[1:])
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * height * width, outputs))


def lenet5(
    input_shape: Sequence[int],
    outputs: int,
    activation: str = "relu",
    pooling: str = "max",
) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998): 5×5 convolutions of 6 and 16 channels, 120 and 84 units.

    The defaults are those of most federated experiments; ``activation="tanh"`` with
    ``pooling="mean"`` is closest to the original, whose pooling has parameters, whose second
    convolution is not fully connected and whose outputs are radial basis functions. Images smaller
    than 32×32 are padded by 2 on each side, as MNIST was. 61,706 parameters for MNIST.

    >>> sum(p.numel() for p in lenet5((28, 28), 10).parameters())
    61706
    """
    pools = {"max": nn.MaxPool2d, "mean": nn.AvgPool2d}
    require(pooling in pools, "pooling", pooling, f"must be one of {', '.join(pools)}")
    shape = _image_shape("lenet5", input_shape, 12)
    activate, pool = activation_of(activation), pools[pooling]
    padding = 2 if min(shape[1:]) < 32 else 0
    height, width = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in shape[1:])
    return nn.Sequential(
        *_images(shape),
        nn.Conv2d(shape[0], 6, 5, padding=padding),
        activate(),
        pool(2),
        nn.Conv2d(6, 16, 5),
        activate(),
        pool(2),
        nn.Flatten(),
        nn.Linear(16 * height * width, 120),
        activate(),
        nn.Linear(120, 84),
        activate(),
        nn.Linear(84, outputs),
    )


def resnet8(
    input_shape: Sequence[int],
    outputs: int,
    channels: Sequence[int] = (16, 32, 64),
    groups: int = 4,
    activation: str = "relu",
) -> nn.Module:
    """ResNet-8 for small images (He et al. 2016, 6n+2 layers with n = 1), with GroupNorm.

    A 3×3 convolution, one residual block per entry of ``channels``, each after the first at half
    the size with a 1×1 convolution as its shortcut, global average pooling, a linear layer. 78,042
    parameters for CIFAR-10.

    >>> sum(p.numel() for p in resnet8((3, 32, 32), 10).parameters())
    78042
    """
    shape = _image_shape("resnet8", input_shape, 1)
    for width in channels:
        require(width % groups == 0, "groups", groups, f"must divide the channels, {[*channels]}")
    activate = activation_of(activation)
    layers = [
        *_images(shape),
        nn.Conv2d(shape[0], channels[0], 3, padding=1, bias=False),
        nn.GroupNorm(groups, channels[0]),
        activate(),
    ]
    for place, (before, after) in enumerate(pairwise([channels[0], *channels])):
        layers.append(_Residual(before, after, 1 if place == 0 else 2, groups, activate))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], outputs)]
    return nn.Sequential(*layers)


class _Residual(nn.Module):
    """Two 3×3 convolutions with GroupNorm beside a shortcut."""

    draws_nothing = True

    def __init__(
        self, before: int, after: int, stride: int, groups: int, activate: type[nn.Module]
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.GroupNorm(groups, after),
            activate(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(groups, after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(groups, after)
            )
        self.activate = activate()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activate(self.body(x) + self.shortcut(x))
        return y


def _image_shape(model: str, input_shape: Sequence[int], least: int) -> tuple[int, int, int]:
    """The shape as (channels, height, width); refused unless it is an image of that size."""
    shape = (1, *input_shape) if len(input_shape) == 2 else tuple(input_shape)
    if len(shape) != 3:
        raise InputError(
            f"model {model} needs images as (height, width) or (channels, height, width), and the "
            f"data has shape {tuple(input_shape)}: use fcnn"
        )
    channels, height, width = shape
    if min(height, width) < least:
        raise InputError(
            f"model {model} needs images of at least {least}×{least} pixels, and the data has "
            f"shape {tuple(input_shape)}: use fcnn or cnn"
        )
    return channels, height, width


def _images(shape: tuple[int, int, int]) -> list[nn.Module]:
    """Layers that give every input its channels, whether or not it has them."""
    return [nn.Flatten(), nn.Unflatten(1, shape)]
