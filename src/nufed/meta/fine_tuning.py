"""Fine-tuning: plain gradient steps on an agent's own batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from nufed.errors import require
from nufed.objective import AnyBatch, AnyObjective
from nufed.objective.parts import Part, support

Rate: TypeAlias = float | Tensor
"""A step size: one number, or one per coordinate of w; with one more dimension in front, those of
each step, where steps beyond the last take the last's."""
T = TypeVar("T")


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
    rates = [_tuned(objective, w, rate, part) for rate in by_step(lr, w)]
    yield w
    for step, batch in enumerate(batches):
        part, rate = at(rates, step)
        if part is None:
            after = descend(w, rate, objective.grad(w, batch))
        else:
            after = part.put(w, descend(part.take(w), rate, objective.base.grad(w, batch, part)))
        w = objective.base.track(after, batch, at=w, overwrite=True)
        yield w


def _tuned(
    objective: AnyObjective, w: Tensor, lr: Rate, part: Part | None
) -> tuple[Part | None, Rate]:
    """The part that a step changes, and its step size there: where it is 0 no gradient is taken."""
    if not isinstance(lr, Tensor) or not lr.ndim == w.ndim == 1 or lr.device.type != "cpu":
        return part, lr
    part = support(lr, objective.base.sizes)
    return part, lr if part is None else part.take(lr)


def descent(
    objective: AnyObjective, w: Tensor, batches: Iterable[AnyBatch], lr: Rate
) -> Iterator[tuple[Tensor, Tensor]]:
    """Fine-tuning as pairs of the gradient ∇f(w_l, 𝒟_l) and the next iterate w_{l+1}."""
    rates = by_step(lr, w)
    for step, batch in enumerate(batches):
        gradient = objective.grad(w, batch)
        w = descend(w, at(rates, step), gradient)
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
    away = y - centre
    if isinstance(away, Tensor):
        return away.mul_(weight).add_(gradient)
    return gradient + weight * away


def by_step(lr: Rate, w: Tensor) -> list[Rate]:
    """The step sizes of the first steps, of which the last serves all further ones.

    Refuses what is neither one number nor one per coordinate of w, nor such vectors by step. In a
    stack, every row may have its own.

    >>> by_step(0.1, torch.zeros(2))
    [0.1]
    >>> by_step(torch.tensor([[0.1, 0.2], [0.3, 0.4]]), torch.zeros(2))
    [tensor([0.1000, 0.2000]), tensor([0.3000, 0.4000])]
    """
    if not isinstance(lr, Tensor):
        return [lr]
    several = lr.ndim > w.ndim and len(lr) > 0
    one = lr[0] if several else lr
    require(
        one.ndim == 0 or (one.shape in (w.shape[-1:], w.shape) and lr.dtype == w.dtype),
        "lr",
        f"{tuple(lr.shape)} of {lr.dtype}",
        f"step sizes must be one number or a tensor like w, {tuple(w.shape[-1:])} of {w.dtype}",
    )
    return list(lr) if several else [lr]


def at(steps: Sequence[T], step: int) -> T:
    """What belongs to this step; beyond the last, the last."""
    return steps[min(step, len(steps) - 1)]


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
