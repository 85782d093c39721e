"""Updates of which the server has only the uniform means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Never

from nufed.algorithms.round_records import AgentUpdate, State


class SingleUpdateError(TypeError):
    """A single update was read where only the mean of all is known."""


@dataclass(frozen=True)
class SummedUpdates(Sequence[AgentUpdate]):
    """The updates of ``agents``, of which only the means of their vectors are known.

    It stands in for a sequence of updates: it has their number, and
    :class:`~nufed.algorithms.aggregation.Mean` combines it; single updates can't be read. They are
    unknown with secure aggregation, and otherwise not kept, so that memory does not grow.
    """

    agents: tuple[int, ...]
    means: State

    def __len__(self) -> int:
        return len(self.agents)

    def __getitem__(self, index: object) -> Never:
        raise SingleUpdateError("single updates are not kept: only their mean is known")
