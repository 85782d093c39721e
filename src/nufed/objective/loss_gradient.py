"""Derivatives of losses by the outputs of a network, without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

nll_loss_forward = torch.ops.aten.nll_loss_forward.default
nll_loss_backward = torch.ops.aten.nll_loss_backward.default
log_softmax_backward = torch.ops.aten._log_softmax_backward_data.default
MEAN, IGNORED = 1, -100  # of cross-entropy: its reduction, and the class number it leaves out


class KnownGradient:
    """Base class of losses that know their derivative."""

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """The derivative by the outputs; None if it is not known for such targets."""
        raise NotImplementedError


def loss_gradient(loss: object, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """The derivative of a loss by the outputs, with the bits of autograd's; None if not known.

    It is known of cross-entropy, and of a :class:`KnownGradient`.

    >>> loss_gradient(F.cross_entropy, torch.zeros(1, 2), torch.tensor([0]))
    tensor([[-0.5000,  0.5000]])
    """
    if isinstance(loss, KnownGradient):
        return loss.gradient(outputs, targets)
    if loss is F.cross_entropy and of_classes(outputs, targets):
        return cross_entropy_gradient(outputs, targets)
    return None


def of_classes(outputs: Tensor, targets: Tensor) -> bool:
    """Whether cross-entropy of them is that of a class number for each sample."""
    return outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point()


def cross_entropy_gradient(outputs: Tensor, targets: Tensor) -> Tensor:
    """The derivative of the mean cross-entropy of class numbers."""
    logs = torch.log_softmax(outputs, dim=1)
    _, number = nll_loss_forward(logs, targets, None, MEAN, IGNORED)
    one = _one(logs.dtype, logs.device)
    by_logs = nll_loss_backward(one, logs, targets, None, MEAN, IGNORED, number)
    found: Tensor = log_softmax_backward(by_logs, logs, 1, logs.dtype)
    return found


@cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((), dtype=dtype, device=device)


def nll_gradients(
    logs: Sequence[Tensor], targets: Tensor, weights: Sequence[float]
) -> list[Tensor]:
    """The derivatives of a weighted sum of −log p of class numbers, each the mean over samples."""
    _, number = nll_loss_forward(logs[0], targets, None, MEAN, IGNORED)
    return [
        nll_loss_backward(own.new_full((), weight), own, targets, None, MEAN, IGNORED, number)
        for own, weight in zip(logs, weights, strict=True)
    ]
