"""Checks updates, then combines them. Nothing else looks at what an agent sent."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor

from nufed.algorithm import ClientUpdate, State
from nufed.errors import UpdateError, require

Averaging: TypeAlias = Literal["uniform", "samples"]
AVERAGING: tuple[str, ...] = get_args(Averaging)
NOT_FINITE = "is not finite"
MOST_SAMPLES = 10**9  # that an agent may say it has
MOST_AGENTS = 10**9


@dataclass(frozen=True)
class Unreadable:
    """Stands in an update for a vector that could not be read, and says why."""

    reason: str


def screen(
    updates: Iterable[ClientUpdate],
    expected: State,
    round: int,
    *,
    cohort: Collection[int] | None = None,
    max_norm: float | None = None,
) -> tuple[list[ClientUpdate], list[UpdateError]]:
    """The updates that may be combined, in the order of agents, and why the others may not.

    Args:
        updates: what came in.
        expected: the server's vector of every name that agents send.
        round: the round that they must be of.
        cohort: the agents that were asked; None: anyone may answer.
        max_norm: how many times the median length of all changes a change may have, of each vector
            by itself; None: any.
    """
    accepted: list[ClientUpdate] = []
    rejected: list[UpdateError] = []
    named: list[ClientUpdate] = []
    for update in updates:
        if _is_number(update.agent) and 0 <= update.agent < MOST_AGENTS:
            named.append(update)
        else:
            rejected.append(UpdateError(-1, round, "its sender is not the number of an agent"))
    for update in sorted(named, key=lambda u: u.agent):
        reason = _fault(update, expected, round)
        if reason is None and cohort is not None and update.agent not in cohort:
            reason = "it was not asked in this round"
        if reason is None and accepted and accepted[-1].agent == update.agent:
            reason = "a second update of the same agent"
        if reason is None:
            accepted.append(update)
        else:
            rejected.append(UpdateError(update.agent, round, reason))
    for name, before in expected.items():
        if max_norm is not None and accepted:
            accepted, too_long = _within(accepted, name, before, round, max_norm)
            rejected += too_long
    return accepted, rejected


def _within(
    updates: list[ClientUpdate], name: str, before: Tensor, round: int, max_norm: float
) -> tuple[list[ClientUpdate], list[UpdateError]]:
    lengths = torch.stack([(u.vectors[name].double() - before).norm() for u in updates])
    most = max_norm * float(lengths.median())
    of = "" if name == "model" else f" of {name!r}"
    kept, left_out = [], []
    for update, length in zip(updates, lengths.tolist(), strict=True):
        if length <= most:
            kept.append(update)
        else:
            reason = f"its change{of} has length {length:.3g}, above {max_norm:g} times the median"
            left_out.append(UpdateError(update.agent, round, reason))
    return kept, left_out


def _fault(update: ClientUpdate, expected: State, round: int) -> str | None:
    """What is wrong with an update, of which any field may be anything."""
    if not _is_number(update.round) or update.round != round:
        return f"the update is of round {_shown(update.round)}"
    if not _is_number(update.samples) or not 0 < update.samples <= MOST_SAMPLES:
        return f"its number of samples is {_shown(update.samples)}, not in 1 … {MOST_SAMPLES}"
    if not isinstance(update.vectors, Mapping):
        return f"it sent {_shown(update.vectors)} instead of vectors with names"
    if update.vectors.keys() != expected.keys():
        names = (n if isinstance(n, str) else _shown(n) for n in islice(update.vectors, 6))
        return f"it sent {reprlib.repr(sorted(names))} instead of {sorted(expected)}"
    for name, right in expected.items():
        reason = _fault_of_vector(update.vectors[name], right)
        if reason is not None:
            return f"{name!r} {reason}"
    return None


def _fault_of_vector(vector: object, right: Tensor) -> str | None:
    """Why a vector can't stand where ``right`` does; it is not copied for that."""
    if isinstance(vector, Unreadable):
        return vector.reason
    if not isinstance(vector, Tensor):
        return f"is {_shown(vector)}, not a tensor"
    if vector.shape != right.shape:
        return f"has shape {reprlib.repr(tuple(vector.shape))} instead of {tuple(right.shape)}"
    for what in ("dtype", "layout", "device"):
        found, wanted = getattr(vector, what), getattr(right, what)
        if found != wanted:
            return f"has {what} {found} instead of {wanted}"
    if vector.numel() == 0:
        return None
    least, most = (float(end) for end in torch.aminmax(vector.detach()))
    if not (math.isfinite(least) and math.isfinite(most)):
        return NOT_FINITE
    # so small that no sum over MOST_AGENTS agents with MOST_SAMPLES samples each overflows
    limit = torch.finfo(torch.promote_types(vector.dtype, torch.float32)).max ** 0.5
    if max(-least, most) > limit:
        return f"has numbers up to {max(-least, most):.2g}, above {limit:.2g}: it diverges"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """Something that may be anything, in few letters."""
    if isinstance(value, int | float) and not abs(value) > 1e20:
        return str(value)
    return f"a {type(value).__name__}"


class Aggregation(Protocol):
    """How the server makes one vector of those that agents sent."""

    def combine(self, updates: Sequence[ClientUpdate], name: str, before: Tensor) -> Tensor:
        """One vector of the updates' vectors called ``name``; ``before`` is what they set out from.

        The updates are checked and in the order of agents, at least one.
        """
        ...


@dataclass(frozen=True)
class Mean:
    """The mean (line 11 of Algorithm 1), uniform or by samples.

    One agent can move it anywhere (breakdown point 0). Cost: one pass over the vectors.
    """

    averaging: Averaging = "uniform"

    def __post_init__(self) -> None:
        allowed = "must be " + " or ".join(AVERAGING)
        require(self.averaging in AVERAGING, "averaging", self.averaging, allowed)

    def combine(self, updates: Sequence[ClientUpdate], name: str, before: Tensor) -> Tensor:
        return average(updates, name, self.averaging)


@dataclass(frozen=True)
class ClippedMean:
    """The mean of changes, each made no longer than the median length of all.

    Attackers below half of the cohort move it by at most their share of that length each round
    (breakdown point 1/2 for the length, 0 for the direction). Cost: three passes.
    """

    def combine(self, updates: Sequence[ClientUpdate], name: str, before: Tensor) -> Tensor:
        changes = _stack(updates, name) - before.double()
        lengths = changes.norm(dim=1, keepdim=True)
        most = lengths.median()
        shares = torch.where(lengths > most, most / lengths, torch.ones_like(lengths))
        return (before.double() + (changes * shares).mean(dim=0)).to(before.dtype)


@dataclass(frozen=True)
class Median:
    """The median of every coordinate (the mean of the middle two, if their number is even).

    Breakdown point 1/2. Where honest agents differ it is far from their mean: a coordinate that
    few agents move stays where it was. Cost: n log n comparisons per coordinate.
    """

    def combine(self, updates: Sequence[ClientUpdate], name: str, before: Tensor) -> Tensor:
        ranked = _stack(updates, name).sort(dim=0).values
        n = len(ranked)
        return ((ranked[(n - 1) // 2] + ranked[n // 2]) / 2).to(before.dtype)


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of every coordinate without the ⌊share·n⌋ largest and as many smallest.

    Breakdown point ``share``. Like the median it loses what few agents have to say. Cost: n log n
    comparisons per coordinate.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        require(0 <= self.share < 0.5, "trim", self.share, "must be 0 or more and below 0.5")

    def combine(self, updates: Sequence[ClientUpdate], name: str, before: Tensor) -> Tensor:
        ranked = _stack(updates, name).sort(dim=0).values
        cut = int(Decimal(repr(self.share)) * len(ranked))  # 0.29 of 100 is 29, not 28.999…
        return ranked[cut : len(ranked) - cut].mean(dim=0).to(before.dtype)


def _stack(updates: Sequence[ClientUpdate], name: str) -> Tensor:
    """The vectors as rows, in a precision that loses nothing."""
    return torch.stack([update.vectors[name].double() for update in updates])


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
    return total.div_(sum(weights)).to(first.dtype)
