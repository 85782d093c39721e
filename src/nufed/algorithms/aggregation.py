"""Aggregation rules: how the server combines the vectors of checked updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from nufed.algorithms.fixed_point import fixed_point_mean, where_wide
from nufed.algorithms.protocol import Algorithm, SummedUpdates, Updates
from nufed.registry import Registry
from nufed.settings import check_settings, setting

SORTED = 2**22  # numbers that are sorted at once
Averaging: TypeAlias = Literal["uniform", "samples", "paper"]


class Aggregation(Protocol):
    """A rule by which the server combines the vectors that agents sent."""

    def combine(self, updates: Updates, name: str, before: Tensor) -> Tensor:
        """The aggregate of the vectors ``name``; ``before`` is the one that agents received.

        There is at least one update; all have passed the checks and are sorted by agent.
        """


@dataclass(frozen=True)
class Mean:
    """The mean (line 11 of Algorithm 1), uniform or by samples, or as in the method's own paper.

    A single agent can move it far (breakdown point 0). Cost: one pass over the vectors. The uniform
    mean is a fixed-point sum, whose bits do not depend on order (:mod:`.fixed_point`): updates are
    added as they arrive, and the server's memory does not grow with their number. Weights by
    samples need all updates.

    >>> from nufed.algorithms.protocol import AgentUpdate
    >>> updates = [AgentUpdate(i, 0, n, {"model": torch.tensor([x])})
    ...            for i, n, x in [(0, 1, 0.0), (1, 3, 4.0)]]
    >>> [Mean(how).combine(updates, "model", torch.zeros(1)) for how in ("uniform", "samples")]
    [tensor([2.]), tensor([3.])]
    """

    averaging: Averaging = setting(
        "uniform", "weights of agents: uniform, by samples, or those of the method's paper"
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def combine(self, updates: Updates, name: str, before: Tensor) -> Tensor:
        if isinstance(updates, SummedUpdates) and self.averaging == "uniform":
            return updates.means[name]
        if self.averaging == "samples":
            return _weighted_mean(updates, name)
        return fixed_point_mean((update.vectors[name] for update in updates), before)


@dataclass(frozen=True)
class ClippedMean:
    """The mean of the changes, each clipped to the median of their norms.

    Attackers below half of the cohort move it by at most their share of that norm in a round
    (breakdown point 1/2 for the norm, 0 for the direction). Cost: three passes, and memory for all
    updates, twice in float64 beside.
    """

    copies: ClassVar[int] = 5  # memory in all updates of a round, in float32

    def combine(self, updates: Updates, name: str, before: Tensor) -> Tensor:
        start = where_wide(before).double()
        changes = _stack(updates, name) - start
        lengths = changes.norm(dim=1, keepdim=True)
        most = lengths.median()
        shares = torch.where(lengths > most, most / lengths, torch.ones_like(lengths))
        return (start + (changes * shares).mean(dim=0)).to(before)


@dataclass(frozen=True)
class Median:
    """The coordinate-wise median (the mean of the middle two of an even number).

    Breakdown point 1/2. On heterogeneous agents it is far from their mean: a coordinate that only
    a minority changes keeps its value. Cost: n log n comparisons per coordinate, and memory for
    all updates.
    """

    def combine(self, updates: Updates, name: str, before: Tensor) -> Tensor:
        n = len(updates)
        return _by_coordinate(
            lambda ranked: (ranked[(n - 1) // 2] + ranked[n // 2]) / 2, updates, name, before
        )


@dataclass(frozen=True)
class TrimmedMean:
    """The coordinate-wise mean without the ⌊trim·n⌋ largest and as many smallest values.

    Breakdown point ``trim``. Like the median, it discards the changes of a minority. Cost: n log n
    comparisons per coordinate, and memory for all updates.
    """

    trim: float = setting(0.2, "share trimmed at each end", least=0, below=0.5)

    def __post_init__(self) -> None:
        check_settings(self)

    def combine(self, updates: Updates, name: str, before: Tensor) -> Tensor:
        cut = int(Decimal(repr(self.trim)) * len(updates))  # 0.29 of 100 is 29, not 28.999…
        return _by_coordinate(
            lambda ranked: ranked[cut : len(ranked) - cut].mean(dim=0), updates, name, before
        )


def _refuse(candidate: Any) -> str | None:
    is_rule = isinstance(candidate, type) and callable(getattr(candidate, "combine", None))
    if is_rule and dataclasses.is_dataclass(candidate):
        return None
    return "is no aggregation rule: it must be a frozen dataclass with a method combine"


AGGREGATIONS: Registry[type] = Registry(
    {"mean": Mean, "clipped": ClippedMean, "median": Median, "trimmed": TrimmedMean},
    "nufed.aggregations",
    "Class",
    _refuse,
)


def update_copies(algorithm: Algorithm) -> int:
    """Memory of an aggregation that needs all updates of a round, in copies of them."""
    return getattr(getattr(algorithm, "aggregation", None), "copies", 1)


def _stack(updates: Updates, name: str) -> Tensor:
    """The vectors as rows, in float64."""
    return torch.stack([where_wide(update.vectors[name]).double() for update in updates])


def _by_coordinate(
    reduce: Callable[[Tensor], Tensor],
    updates: Updates,
    name: str,
    before: Tensor,
) -> Tensor:
    """``reduce`` of each coordinate's sorted values (as rows, in float64), in small pieces."""
    combined = torch.empty_like(before)
    width = max(2**10, SORTED // len(updates))
    wide = (where_wide(update.vectors[name]) for update in updates)
    rows = [torch.split(vector.flatten(), width) for vector in wide]
    for piece, part in enumerate(torch.split(combined.view(-1), width)):
        values = torch.stack([row[piece].double() for row in rows])
        part.copy_(reduce(values.sort(dim=0).values))
    return combined


def _weighted_mean(updates: Updates, name: str) -> Tensor:
    """The mean of the updates' vectors ``name`` by samples, summed in the given order."""
    first = updates[0].vectors[name]
    # half precision would round off small terms of a long sum
    total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
    for update in updates:
        total.add_(update.vectors[name].to(total.dtype), alpha=update.samples)
    return total.div_(sum(update.samples for update in updates)).to(first.dtype)
