"""Aggregation rules: how the server combines the vectors of checked updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from nufed.algorithms.protocol import AgentUpdate
from nufed.registry import Registry
from nufed.settings import check_settings, setting

Averaging: TypeAlias = Literal["uniform", "samples"]


class Aggregation(Protocol):
    """A rule by which the server combines the vectors that agents sent."""

    def combine(self, updates: Sequence[AgentUpdate], name: str, before: Tensor) -> Tensor:
        """The aggregate of the vectors ``name``; ``before`` is the one that agents received.

        There is at least one update; all have passed the checks and are sorted by agent.
        """
        ...


@dataclass(frozen=True)
class Mean:
    """The mean (line 11 of Algorithm 1), uniform or by samples.

    A single agent can move it arbitrarily (breakdown point 0). Cost: one pass over the vectors.
    """

    averaging: Averaging = setting("uniform", "weights of agents: uniform, or by samples")

    def __post_init__(self) -> None:
        check_settings(self)

    def combine(self, updates: Sequence[AgentUpdate], name: str, before: Tensor) -> Tensor:
        return average(updates, name, self.averaging)


@dataclass(frozen=True)
class ClippedMean:
    """The mean of the changes, each clipped to the median of their norms.

    Attackers below half of the cohort move it by at most their share of that norm in a round
    (breakdown point 1/2 for the norm, 0 for the direction). Cost: three passes.
    """

    def combine(self, updates: Sequence[AgentUpdate], name: str, before: Tensor) -> Tensor:
        changes = _stack(updates, name) - before.double()
        lengths = changes.norm(dim=1, keepdim=True)
        most = lengths.median()
        shares = torch.where(lengths > most, most / lengths, torch.ones_like(lengths))
        return (before.double() + (changes * shares).mean(dim=0)).to(before.dtype)


@dataclass(frozen=True)
class Median:
    """The coordinate-wise median (the mean of the middle two of an even number).

    Breakdown point 1/2. On heterogeneous agents it is far from their mean: a coordinate that only
    a minority changes keeps its value. Cost: n log n comparisons per coordinate.
    """

    def combine(self, updates: Sequence[AgentUpdate], name: str, before: Tensor) -> Tensor:
        ranked = _stack(updates, name).sort(dim=0).values
        n = len(ranked)
        return ((ranked[(n - 1) // 2] + ranked[n // 2]) / 2).to(before.dtype)


@dataclass(frozen=True)
class TrimmedMean:
    """The coordinate-wise mean without the ⌊trim·n⌋ largest and as many smallest values.

    Breakdown point ``trim``. Like the median, it discards the changes of a minority. Cost: n log n
    comparisons per coordinate.
    """

    trim: float = setting(0.2, "share trimmed at each end", least=0, below=0.5)

    def __post_init__(self) -> None:
        check_settings(self)

    def combine(self, updates: Sequence[AgentUpdate], name: str, before: Tensor) -> Tensor:
        ranked = _stack(updates, name).sort(dim=0).values
        cut = int(Decimal(repr(self.trim)) * len(ranked))  # 0.29 of 100 is 29, not 28.999…
        return ranked[cut : len(ranked) - cut].mean(dim=0).to(before.dtype)


def _refuse(found: Any) -> str | None:
    is_rule = isinstance(found, type) and callable(getattr(found, "combine", None))
    if is_rule and dataclasses.is_dataclass(found):
        return None
    return "is no aggregation rule: it must be a frozen dataclass with a method combine"


AGGREGATIONS: Registry[type] = Registry(
    {"mean": Mean, "clipped": ClippedMean, "median": Median, "trimmed": TrimmedMean},
    "nufed.aggregations",
    "Class",
    _refuse,
)


def _stack(updates: Sequence[AgentUpdate], name: str) -> Tensor:
    """The vectors as rows, in float64."""
    return torch.stack([update.vectors[name].double() for update in updates])


def average(updates: Sequence[AgentUpdate], name: str, averaging: Averaging) -> Tensor:
    """The mean of the updates' vectors ``name``, summed in the given order.

    ``"uniform"`` weighs agents equally (line 11 of Algorithm 1), ``"samples"`` by their number of
    training samples.

    >>> updates = [AgentUpdate(i, 0, n, {"model": torch.tensor([x])})
    ...            for i, n, x in [(0, 1, 0.0), (1, 3, 4.0)]]
    >>> average(updates, "model", "uniform"), average(updates, "model", "samples")
    (tensor([2.]), tensor([3.]))
    """
    first = updates[0].vectors[name]
    # half precision would round off small terms of a long sum
    total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
    weights = [update.samples if averaging == "samples" else 1 for update in updates]
    for update, weight in zip(updates, weights, strict=True):
        total.add_(update.vectors[name].to(total.dtype), alpha=weight)
    return total.div_(sum(weights)).to(first.dtype)
