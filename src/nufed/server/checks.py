"""Validates a single update before aggregation. Only norms are checked elsewhere (.norms)."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

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


def fault_of(
    update: AgentUpdate,
    expected: State,
    round: int,
    bounds: Mapping[str, float],
    cohort: Collection[int] | None = None,
) -> str | None:
    """Why a single update is invalid, if it is; any field may have any type.

    Args:
        update: as received.
        expected: the server's vectors, by name, that agents send.
        round: the current round.
        bounds: on the numbers of each vector (:mod:`nufed.algorithms.fixed_point`).
        cohort: the agents of the round; None: any agent.
    """
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
    for name, right in expected.items():
        reason = _fault_of_vector(update.vectors[name], right, bounds[name])
        if reason is not None:
            return f"{name!r} {reason}"
    if cohort is not None and update.agent not in cohort:
        return "it is not in this round's cohort"
    return None


def _fault_of_vector(vector: object, right: Tensor, bound: float) -> str | None:
    """Why a vector can't replace ``right``, if it can't; makes no copy."""
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
    limit = min(bound, torch.finfo(torch.promote_types(vector.dtype, torch.float32)).max ** 0.5)
    if max(-least, most) > limit:
        return (
            f"has numbers up to {max(-least, most):.2g}, above {limit:.2g}, the bound of this "
            f"round: {DIVERGES}"
        )
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """Short text for a value of any type."""
    if isinstance(value, int | float) and not abs(value) > 1e20:
        return str(value)
    return f"a {type(value).__name__}"
