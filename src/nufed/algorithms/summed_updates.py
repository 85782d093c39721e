"""Updates of which the server has only the uniform means (secure aggregation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Never

from nufed.algorithms.round_records import AgentUpdate, State


@dataclass(frozen=True)
class SummedUpdates(Sequence[AgentUpdate]):
    """The updates of ``agents``, of which only the means of their vectors are known.

    It stands in for a sequence of updates: it has their number, and
    :class:`~nufed.algorithms.aggregation.Mean` combines it; single updates can't be read.
    """

    agents: tuple[int, ...]
    means: State

    def __len__(self) -> int:
        return len(self.agents)

    def __getitem__(self, index: object) -> Never:
        raise TypeError("single updates are unknown: secure aggregation reveals only their mean")
