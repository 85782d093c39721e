"""Validates every update before aggregation. Nothing else inspects what an agent sent."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from nufed.algorithms.fixed_point import FixedPointGrid
from nufed.algorithms.protocol import AgentUpdate, State
from nufed.errors import UpdateError

NOT_FINITE = "is not finite"
DIVERGES = "it diverges"
MOST_SAMPLES = 10**9  # upper bound on the sample count that an agent may report
MOST_AGENTS = 10**9
LEAST_FOR_MEDIAN = 3  # updates


@dataclass(frozen=True)
class Unreadable:
    """Placeholder in an update for a vector that could not be decoded, with the reason."""

    reason: str


def screen(
    updates: Iterable[AgentUpdate],
    expected: State,
    round: int,
    *,
    cohort: Collection[int] | None = None,
    max_norm: float | None = None,
) -> tuple[list[AgentUpdate], list[UpdateError]]:
    """The valid updates, sorted by agent, and an error for each rejected one.

    Args:
        updates: as received.
        expected: the server's vectors, by name, that agents send.
        round: the current round.
        cohort: the agents of the round; None: any agent.
        max_norm: upper bound on the norm of a change relative to the median over agents, for each
            vector separately; None: no bound. Not applied to fewer than three updates: of two
            norms it can't be said which one is wrong.
    """
    bounds = {name: FixedPointGrid.of(vector).bound for name, vector in expected.items()}
    accepted: list[AgentUpdate] = []
    rejected: list[UpdateError] = []
    named: list[AgentUpdate] = []
    for update in updates:
        if _is_number(update.agent) and 0 <= update.agent < MOST_AGENTS:
            named.append(update)
        else:
            rejected.append(UpdateError(-1, round, "its sender is not a valid agent number"))
    for update in sorted(named, key=lambda u: u.agent):
        reason = _fault(update, expected, round, bounds)
        if reason is None and cohort is not None and update.agent not in cohort:
            reason = "it is not in this round's cohort"
        if reason is None and accepted and accepted[-1].agent == update.agent:
            reason = "a duplicate update of this agent"
        if reason is None:
            accepted.append(update)
        else:
            rejected.append(UpdateError(update.agent, round, reason))
    bounded = max_norm is not None and len(accepted) >= LEAST_FOR_MEDIAN
    for name, before in expected.items():
        if max_norm is not None and bounded and accepted:
            accepted, too_large = _within_norm(accepted, name, before, round, max_norm)
            rejected += too_large
    return accepted, rejected


def _within_norm(
    updates: list[AgentUpdate], name: str, before: Tensor, round: int, max_norm: float
) -> tuple[list[AgentUpdate], list[UpdateError]]:
    norms = torch.stack([(u.vectors[name].double() - before).norm() for u in updates])
    most = max_norm * float(norms.median())
    of = "" if name == "model" else f" of {name!r}"
    accepted, rejected = [], []
    for update, norm in zip(updates, norms.tolist(), strict=True):
        if norm <= most:
            accepted.append(update)
        else:
            reason = f"its change{of} has norm {norm:.3g}, above {max_norm:g} times the median"
            rejected.append(UpdateError(update.agent, round, reason))
    return accepted, rejected


def _fault(
    update: AgentUpdate, expected: State, round: int, bounds: Mapping[str, float]
) -> str | None:
    """Why an update is invalid, if it is; any field may have any type."""
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
