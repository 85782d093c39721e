"""Fine-tuning: plain gradient steps on an agent's own batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from nufed.errors import require
from nufed.objective import AnyBatch, AnyObjective
from nufed.objective.parts import Part, support

Rate: TypeAlias = float | Tensor
"""A step size: one number, or one per coordinate of w."""


def trajectory(
    objective: AnyObjective,
    w: Tensor,
    batches: Iterable[AnyBatch],
    lr: Rate,
    part: Part | None = None,
) -> Iterator[Tensor]:
    """The iterates w₀ = w, w₁, …, w_ν of fine-tuning.

    w_{l+1} = w_l − α∇f(w_l, 𝒟_l)   (the paper's w̃_l, Remark 2)

    Running statistics that the objective tracks are updated, too. With a ``part`` only its
    coordinates take steps, of one size.

    >>> from nufed import Objective
    >>> objective = Objective(torch.nn.Linear(1, 1, bias=False), torch.nn.functional.mse_loss)
    >>> batch = (torch.ones(1, 1), torch.zeros(1, 1))
    >>> list(trajectory(objective, torch.tensor([8.0]), [batch, batch], lr=0.25))
    [tensor([8.]), tensor([4.]), tensor([2.])]
    """
    check_rate(lr, w)
    rate = lr
    if isinstance(lr, Tensor) and lr.ndim == 1 and w.ndim == 1 and lr.device.type == "cpu":
        part = support(lr, objective.base.sizes)  # where it is 0 no gradient is needed
        rate = lr if part is None else part.take(lr)
    yield w
    for batch in batches:
        if part is None:
            after = descend(w, rate, objective.grad(w, batch))
        else:
            after = part.put(w, descend(part.take(w), rate, objective.base.grad(w, batch, part)))
        w = objective.base.track(after, batch, at=w, overwrite=True)
        yield w


def descent(
    objective: AnyObjective, w: Tensor, batches: Iterable[AnyBatch], lr: Rate
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same as pairs of the gradient ∇f(w_l, 𝒟_l) and the next iterate w_{l+1}."""
    check_rate(lr, w)
    for batch in batches:
        gradient = objective.grad(w, batch)
        w = descend(w, lr, gradient)
        yield gradient, w


def adapt(objective: AnyObjective, w: Tensor, batches: Iterable[AnyBatch], lr: Rate) -> Tensor:
    """The model after one fine-tuning step on each of ``batches``; w itself is not changed.

    >>> from nufed import Objective
    >>> objective = Objective(torch.nn.Linear(1, 1, bias=False), torch.nn.functional.mse_loss)
    >>> batch = (torch.ones(1, 1), torch.zeros(1, 1))
    >>> adapt(objective, torch.tensor([8.0]), [batch, batch], lr=0.25)
    tensor([2.])
    """
    (adapted,) = deque(trajectory(objective, w, batches, lr), maxlen=1)
    return adapted


def descend(w: Tensor, lr: Rate, direction: Tensor) -> Tensor:
    """w − lr·direction, in one pass over memory where lr is one number."""
    if isinstance(w, Tensor) and not isinstance(lr, Tensor):
        return torch.sub(w, direction, alpha=lr)
    if isinstance(w, Tensor):
        change = direction * lr
        return torch.sub(w, change, out=change)
    return w + direction * -lr


def proximal(gradient: Tensor, weight: float, y: Tensor, centre: Tensor) -> Tensor:
    """∇f(y) + μ(y − centre), with μ = ``weight``.

    >>> proximal(torch.ones(1), 0.5, torch.tensor([4.0]), torch.tensor([2.0]))
    tensor([2.])
    """
    return gradient + weight * (y - centre)


def check_rate(lr: Rate, w: Tensor) -> None:
    """Refuse a step size that is neither one number nor one number per coordinate of w.

    In a stack, every row may have its own.
    """
    if isinstance(lr, Tensor):
        require(
            lr.ndim == 0 or (lr.shape in (w.shape[-1:], w.shape) and lr.dtype == w.dtype),
            "lr",
            f"{tuple(lr.shape)} of {lr.dtype}",
            f"step sizes must be one number or a tensor like w, {tuple(w.shape[-1:])} of {w.dtype}",
        )


def per_coordinate(numbers: Tensor, sizes: Sequence[int]) -> Tensor:
    """E·numbers: one number per parameter tensor as a vector like w; for a stack, row by row.

    >>> per_coordinate(torch.tensor([0.1, 0.2]), sizes=[2, 1])
    tensor([0.1000, 0.1000, 0.2000])
    """
    pairs = zip(torch.split(numbers, 1, dim=-1), sizes, strict=True)
    return torch.cat([number.expand(*number.shape[:-1], size) for number, size in pairs], dim=-1)


def per_tensor(vector: Tensor, sizes: Sequence[int]) -> Tensor:
    """Eᵀ·vector: the sum over each parameter tensor.

    >>> per_tensor(torch.tensor([1.0, 2.0, 3.0]), sizes=[2, 1])
    tensor([3., 3.])
    """
    parts = torch.split(vector, list(sizes), dim=-1)
    return torch.stack([part.sum(dim=-1) for part in parts], dim=-1)
