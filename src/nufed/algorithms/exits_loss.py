"""The derivative of ScaleFL's loss of several exits by their outputs, without autograd."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nufed.objective.loss_gradient import log_softmax_backward, nll_gradients


def exits_gradient(
    outputs: Tensor, targets: Tensor, exit_weight: float, distill_weight: float, temperature: float
) -> Tensor:
    """∂f/∂z_j of exits j = 1 … d (:mod:`.scalefl`), with ℓ cross-entropy and autograd's bits.

    Args:
        outputs: z, (exits, samples, classes).
        targets: class numbers.
        exit_weight: a.
        distill_weight: γ.
        temperature: T.
    """
    depth = len(outputs)
    total = depth + exit_weight * sum(range(depth))
    weights = [*(exit_weight * j / total for j in range(1, depth)), depth / total]
    logs = torch.log_softmax(outputs, dim=2)
    by_logs = torch.stack(nll_gradients(logs.unbind(), targets, weights))
    d: Tensor = log_softmax_backward(by_logs, logs, 2, logs.dtype)
    if distill_weight and depth > 1:
        # T²·KL(p_d ‖ p_j) has the derivative −T²p_d by log p_j
        logs = torch.log_softmax(outputs / temperature, dim=2)
        weight, kind = distill_weight / total, (d.dtype, d.device)
        each = _distillation(depth, len(targets), weight, temperature, *kind)
        by_logs = each * logs[-1].exp()
        d[:-1] += log_softmax_backward(by_logs, logs[:-1], 2, logs.dtype).div_(temperature)
    return d


@lru_cache(maxsize=64)  # the same in every step
def _distillation(
    depth: int,
    samples: int,
    weight: float,
    temperature: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The derivative of f by −p_d·log p_j of a sample, for j < d."""
    exits = torch.arange(1, depth, dtype=dtype, device=device).view(-1, 1, 1)
    return (weight * exits * temperature**2 / samples).neg_()
