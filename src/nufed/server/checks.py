"""Validates a single update before aggregation. Only norms are checked elsewhere (.norms)."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from nufed.algorithms.fixed_point import peak
from nufed.algorithms.protocol import AgentUpdate, State

NO_AGENT = "its sender is not a valid agent number"
NOT_FINITE = "is not finite"
DIVERGES = "it diverges"
MOST_SAMPLES = 10**9  # upper bound on the sample count that an agent may report
MOST_AGENTS = 10**9


@dataclass(frozen=True)
class Unreadable:
    """Placeholder in an update for a vector that could not be decoded, with the reason."""

    reason: str


def examine(
    update: AgentUpdate,
    expected: State,
    round: int,
    bounds: Mapping[str, float],
    cohort: Collection[int] | None = None,
) -> tuple[str | None, dict[str, float]]:
    """Why a single update is invalid, if it is, and the largest magnitude in each of its vectors.

    Any field may have any type.

    Args:
        update: as received.
        expected: the server's vectors, by name, that agents send.
        round: the current round.
        bounds: on the numbers of each vector (:mod:`nufed.algorithms.fixed_point`).
        cohort: the agents of the round; None: any agent.
    """
    largest: dict[str, float] = {}
    reason = _fault_of_header(update, expected, round)
    if reason is not None:
        return reason, largest
    for name, right in expected.items():
        vector = update.vectors[name]
        reason = _fault_of_form(vector, right)
        if reason is None:
            largest[name] = peak(vector)
            reason = _fault_of_size(largest[name], vector.dtype, bounds[name])
        if reason is not None:
            return f"{name!r} {reason}", largest
    if cohort is not None and update.agent not in cohort:
        return "it is not in this round's cohort", largest
    return None, largest


def _fault_of_header(update: AgentUpdate, expected: State, round: int) -> str | None:
    """What is wrong with an update beside the values of its vectors, if anything."""
    if not _is_number(update.agent) or not 0 <= update.agent < MOST_AGENTS:
        return NO_AGENT
    if not _is_number(update.round) or update.round != round:
        return f"the update is of round {_shown(update.round)}"
    if not _is_number(update.samples) or not 0 < update.samples <= MOST_SAMPLES:
        return f"its number of samples is {_shown(update.samples)}, not in 1 … {MOST_SAMPLES}"
    if not isinstance(update.vectors, Mapping):
        return f"it sent {_shown(update.vectors)} instead of named vectors"
    if update.vectors.keys() != expected.keys():
        names = (n if isinstance(n, str) else _shown(n) for n in islice(update.vectors, 6))
        return f"it sent {reprlib.repr(sorted(names))} instead of {sorted(expected)}"
    return None


def _fault_of_form(vector: object, right: Tensor) -> str | None:
    """Why a vector is not of the form of ``right``, if it is not."""
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
    return None


def _fault_of_size(largest: float, dtype: torch.dtype, bound: float) -> str | None:
    """Why a vector with numbers up to ``largest`` is invalid, if it is."""
    if not math.isfinite(largest):
        return NOT_FINITE
    # so small that no sum over MOST_AGENTS agents with MOST_SAMPLES samples each overflows
    limit = min(bound, torch.finfo(torch.promote_types(dtype, torch.float32)).max ** 0.5)
    if largest > limit:
        return (
            f"has numbers up to {largest:.2g}, above {limit:.2g}, the bound of this round: "
            f"{DIVERGES}"
        )
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """Short text for a value of any type."""
    if isinstance(value, int | float) and not abs(value) > 1e20:
        return str(value)
    return f"a {type(value).__name__}"
