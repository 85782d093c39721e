"""Validates a single update before aggregation.

``max_update_norm`` bounds the norms of changes, relative to medians over agents.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from nufed.algorithms.fixed_point import peak, where_wide
from nufed.algorithms.protocol import AgentUpdate, State
from nufed.errors import Fault, UpdateError

LEAST_FOR_MEDIAN = 3  # updates
PIECE = 2**16  # numbers of a vector that are compared at once, in the cache


def change_norm(vector: Tensor, before: Tensor, counted: int | None = None) -> float:
    """‖vector − before‖ in float64, in pieces, so that a large model is not copied.

    With ``counted`` only so many of the first numbers count (:meth:`nufed.Objective.counted`).
    """
    after, start = (where_wide(each.detach().flatten()[:counted]) for each in (vector, before))
    pieces = list(zip(*(torch.split(each, PIECE) for each in (after, start)), strict=True))
    squares = after.new_zeros(len(pieces), dtype=torch.float64)  # read at once, by one copy
    buffer = after.new_empty(min(PIECE, after.numel()), dtype=torch.float64)
    for square, (a, b) in zip(squares, pieces, strict=True):
        change = buffer[: a.numel()].copy_(a).sub_(b)
        torch.dot(change, change, out=square)
    return math.sqrt(math.fsum(squares.tolist()))


class NormBound:
    """Rejects updates whose change of a vector has a norm above

        factor · max(m_k, m_{k−1}),   m_k the median over the updates of round k,

    for each vector separately. A norm up to factor·m_{k−1} is accepted whatever others send, so
    that such an update can be added to a sum as it arrives. At most half of a round's updates
    exceed m_k, so a sudden growth of all changes rejects none with a factor of 1 or more. Fewer
    than three updates are not bounded: of two norms it can't be said which one is wrong.

    Args:
        factor: ``max_update_norm``; None: no bound.
        expected: the server's vectors, by name, that agents send.
        last: m_{k−1} by name, from :attr:`medians` of an earlier round.
        counted: of vectors with running statistics, how many numbers are parameters, which alone
            count in norms.
    """

    def __init__(
        self,
        factor: float | None,
        expected: State,
        last: Mapping[str, float],
        counted: Mapping[str, int],
    ) -> None:
        self._factor, self._expected, self._last = factor, expected, last
        self._counted = counted
        self._norms: dict[int, dict[str, float]] = {}  # by agent and vector

    def accepts(self, update: AgentUpdate) -> bool:
        """Record a valid update; returns whether it is accepted regardless of later ones."""
        if self._factor is None:
            return True
        counted = self._counted
        norms = {
            n: change_norm(update.vectors[n], b, counted.get(n)) for n, b in self._expected.items()
        }
        self._norms[update.agent] = norms
        return all(x <= self._factor * self._last.get(n, 0.0) for n, x in norms.items())

    @property
    def medians(self) -> dict[str, float]:
        """m_k by name, for the next round; earlier ones where there are too few updates."""
        if len(self._norms) < LEAST_FOR_MEDIAN:
            return dict(self._last)
        return {**self._last, **{n: self._median(n, self._norms) for n in self._expected}}

    def rejected(self) -> dict[int, str]:
        """The agents whose updates are rejected, and why; a vector's median is over those that
        the vectors before it have left."""
        reasons: dict[int, str] = {}
        if self._factor is None or len(self._norms) < LEAST_FOR_MEDIAN:
            return reasons
        for name in self._expected:
            left = sorted(self._norms.keys() - reasons.keys())
            if not left:
                break
            most = self._factor * max(self._median(name, left), self._last.get(name, 0.0))
            of = "" if name == "model" else f" of {name!r}"
            reasons |= {
                agent: f"its change{of} has norm {self._norms[agent][name]:.3g}, above "
                f"{self._factor:g} times the median"
                for agent in left
                if self._norms[agent][name] > most
            }
        return reasons

    def _median(self, name: str, agents: Iterable[int]) -> float:
        norms = sorted(self._norms[agent][name] for agent in agents)
        return norms[(len(norms) - 1) // 2]


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
) -> dict[str, float]:
    """Check a single update, whose fields may have any type.

    Returns the largest magnitude in each of its vectors; raises an UpdateError if it is invalid.

    Args:
        update: as received.
        expected: the server's vectors, by name, that agents send.
        round: the current round.
        bounds: on the numbers of each vector (:mod:`nufed.algorithms.fixed_point`).
        cohort: the agents of the round; None: any agent.
    """
    if not _is_number(update.agent) or not 0 <= update.agent < MOST_AGENTS:
        raise UpdateError(-1, round, "its sender is not a valid agent number")
    reason = _fault_of_header(update, expected, round)
    if reason is not None:
        raise UpdateError(update.agent, round, reason)
    largest: dict[str, float] = {}
    for name, right in expected.items():
        vector = update.vectors[name]
        reason = _fault_of_form(vector, right)
        if reason is not None:
            raise UpdateError(update.agent, round, f"{name!r} {reason}")
        largest[name] = peak(vector)
        if not math.isfinite(largest[name]):
            reason = f"{name!r} is not finite"
            raise UpdateError(update.agent, round, reason, Fault.NOT_FINITE)
        # so small that no sum over MOST_AGENTS agents with MOST_SAMPLES samples each overflows
        dtype = torch.promote_types(vector.dtype, torch.float32)
        limit = min(bounds[name], torch.finfo(dtype).max ** 0.5)
        if largest[name] > limit:
            reason = (
                f"{name!r} has numbers up to {largest[name]:.2g}, above {limit:.2g}, the bound of "
                "this round: it diverges"
            )
            raise UpdateError(update.agent, round, reason, Fault.DIVERGED)
    if cohort is not None and update.agent not in cohort:
        raise UpdateError(update.agent, round, "it is not in this round's cohort")
    return largest


def _fault_of_header(update: AgentUpdate, expected: State, round: int) -> str | None:
    """What is wrong with an update beside its sender and the values of its vectors, if anything."""
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
        given, wanted = getattr(vector, what), getattr(right, what)
        if given != wanted:
            return f"has {what} {given} instead of {wanted}"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """Short text for a value of any type."""
    if isinstance(value, int | float) and not abs(value) > 1e20:
        return str(value)
    return f"a {type(value).__name__}"
