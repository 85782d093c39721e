"""Checks updates, then combines them. Nothing else looks at what an agent sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from nufed.algorithm import ClientUpdate, State
from nufed.errors import UpdateError

Averaging: TypeAlias = Literal["uniform", "samples"]
AVERAGING: tuple[str, ...] = get_args(Averaging)


def screen(
    updates: Iterable[ClientUpdate], expected: State, round: int
) -> tuple[list[ClientUpdate], list[UpdateError]]:
    """The updates that may be averaged, in the order of agents, and why the others may not.

    ``expected`` maps the name of every vector to one of the right shape and dtype.
    """
    accepted: list[ClientUpdate] = []
    rejected: list[UpdateError] = []
    for update in sorted(updates, key=lambda u: u.agent):
        reason = _fault(update, expected, round)
        if reason is None and accepted and accepted[-1].agent == update.agent:
            reason = "a second update of the same agent"
        if reason is None:
            accepted.append(update)
        else:
            rejected.append(UpdateError(update.agent, round, reason))
    return accepted, rejected


def _fault(update: ClientUpdate, expected: State, round: int) -> str | None:
    if update.round != round:
        return f"the update is of round {update.round}"
    if not (math.isfinite(update.samples) and update.samples > 0):
        return f"its number of samples is {update.samples}, not above 0"
    if set(update.vectors) != set(expected):
        return f"it sent {sorted(update.vectors)} instead of {sorted(expected)}"
    for name, right in expected.items():
        vector = update.vectors[name]
        if vector.shape != right.shape:
            return f"{name!r} has shape {tuple(vector.shape)} instead of {tuple(right.shape)}"
        if vector.dtype != right.dtype:
            return f"{name!r} has dtype {vector.dtype} instead of {right.dtype}"
        # a sum is not finite if a number isn't, and looked at more closely in case it is too large
        if not math.isfinite(vector.sum()) and not torch.isfinite(vector).all():
            return f"{name!r} is not finite"
    return None


def average(updates: Sequence[ClientUpdate], name: str, averaging: Averaging) -> Tensor:
    """The mean of the updates' vectors called ``name``, summed in the given order.

    ``"uniform"`` weighs agents equally (line 11 of Algorithm 1), ``"samples"`` by their number of
    training samples.

    >>> updates = [ClientUpdate(i, 0, n, {"model": torch.tensor([x])})
    ...            for i, n, x in [(0, 1, 0.0), (1, 3, 4.0)]]
    >>> average(updates, "model", "uniform"), average(updates, "model", "samples")
    (tensor([2.]), tensor([3.]))
    """
    first = updates[0].vectors[name]
    # half precision would lose small terms of a long sum
    total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
    weights = [update.samples if averaging == "samples" else 1 for update in updates]
    for update, weight in zip(updates, weights, strict=True):
        total.add_(update.vectors[name].to(total.dtype), alpha=weight)
    return (total / sum(weights)).to(first.dtype)
