"""The bound ``max_update_norm`` on the norms of changes, relative to medians over agents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from nufed.algorithms.protocol import AgentUpdate, State

LEAST_FOR_MEDIAN = 3  # updates
PIECE = 2**16  # numbers of a vector that are compared at once, in the cache


def change_norm(vector: Tensor, before: Tensor, counted: int | None = None) -> float:
    """‖vector − before‖ in float64, in pieces, so that a large model is not copied.

    With ``counted`` only so many of the first numbers count (:meth:`nufed.Objective.counted`).
    """
    own = (each.detach().flatten()[:counted] for each in (vector, before))
    pieces = (torch.split(each, PIECE) for each in own)
    changes = (a.to(torch.float64, copy=True).sub_(b) for a, b in zip(*pieces, strict=True))
    return math.sqrt(math.fsum(float(torch.dot(change, change)) for change in changes))


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
        """Note a valid update; whether it is accepted whatever others send."""
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
