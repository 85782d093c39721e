"""The updates of a round as they arrive: checked one by one, and added to a sum where possible.

Where it is not, they wait in a temporary file, so that they take no memory.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import IO

import torch

from nufed.algorithms.fixed_point import FixedPointGrid, RunningMean
from nufed.algorithms.protocol import (
    AgentUpdate,
    Algorithm,
    Context,
    SingleUpdateError,
    State,
    SummedUpdates,
)
from nufed.errors import Fault, RunError, UpdateError
from nufed.server.checks import NormBound, examine


class Spool:
    """The vectors of agents in a temporary file, which is created with the first.

    >>> spool = Spool()
    >>> spool.put(7, {"model": torch.tensor([1.0, 2.0])})
    >>> 7 in spool, spool.get(7)
    (True, {'model': tensor([1., 2.])})
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: dict[int, tuple[int, dict[str, tuple[torch.dtype, torch.Size]]]] = {}

    def __contains__(self, agent: int) -> bool:
        return agent in self._places

    def put(self, agent: int, vectors: State) -> None:
        """Store an agent's vectors."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 (it outlives this call)
                weakref.finalize(self, self._file.close)
            start = self._file.seek(0, 2)
            for vector in vectors.values():
                flat = vector.detach().cpu().contiguous().view(-1)
                self._file.write(flat.view(torch.uint8).numpy().data)
        except OSError as error:
            raise RunError(
                f"an update can't be written to a temporary file in {tempfile.gettempdir()} "
                f"({error.strerror}): free space there, set TMPDIR to another directory, or set "
                'max_update_norm = "off"'
            ) from error
        self._places[agent] = start, {n: (v.dtype, v.shape) for n, v in vectors.items()}

    def get(self, agent: int) -> State:
        """An agent's vectors."""
        assert self._file is not None
        start, kinds = self._places[agent]
        self._file.seek(start)
        vectors = {}
        for name, (dtype, shape) in kinds.items():
            content = torch.empty(shape.numel() * dtype.itemsize, dtype=torch.uint8)
            self._file.readinto(content.numpy())  # type: ignore[attr-defined]
            vectors[name] = content.view(dtype).view(shape)
        return vectors

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()


def sums_suffice(algorithm: Algorithm, context: Context, server: State) -> bool:
    """Whether the server's step needs only the means of the updates, which is tried.

    The trial has the first number of every vector, or the whole ones if it fails with these.
    """
    for tried in ({name: vector.flatten()[:1] for name, vector in server.items()}, server):
        sent = {name: tried[name] for name in algorithm.sent_in(context.round)}
        try:
            algorithm.server_update(context, tried, SummedUpdates((0,), sent))
        except SingleUpdateError:
            return False
        except Exception:  # the error is raised when the round is closed
            continue
        return True
    return False


class Incoming:
    """The updates of one round, in any order.

    Args:
        expected: the server's vectors, by name, that agents send.
        round: the current round.
        cohort: the agents of the round; None: any agent.
        max_norm: ``max_update_norm`` (:class:`~nufed.server.checks.NormBound`); None: no bound.
        medians: those of earlier rounds, for ``max_norm``.
        counted: as in :class:`~nufed.algorithms.Context`.
        summed: whether valid updates are added to a sum as they arrive and not kept. Those that
            ``max_norm`` may yet reject wait in a temporary file until the round is closed.
    """

    def __init__(
        self,
        expected: State,
        round: int,
        *,
        cohort: Collection[int] | None = None,
        max_norm: float | None = None,
        medians: Mapping[str, float] | None = None,
        counted: Mapping[str, int] | None = None,
        summed: bool = False,
    ) -> None:
        self._expected, self._round, self._cohort = expected, round, cohort
        grids = {name: FixedPointGrid.of(vector) for name, vector in expected.items()}
        self._grid_bounds = {name: grid.bound for name, grid in grids.items()}
        self._norms = NormBound(max_norm, expected, medians or {}, counted or {})
        self._means = (
            {name: RunningMean(vector, grids[name]) for name, vector in expected.items()}
            if summed
            else None
        )
        self._valid: set[int] = set()
        self._kept: list[AgentUpdate] = []  # all valid ones, unless summed
        self._waiting = Spool()
        self._rejected: list[UpdateError] = []

    @property
    def medians(self) -> dict[str, float]:
        """The median norms of changes, by vector, for the next round; empty without a bound."""
        return self._norms.medians

    def add(self, update: AgentUpdate) -> None:
        """Check an update; add it to the sum, or keep it."""
        try:
            largest = examine(update, self._expected, self._round, self._grid_bounds, self._cohort)
            if update.agent in self._valid:
                raise UpdateError(update.agent, self._round, "a duplicate update of this agent")
        except UpdateError as error:
            self._rejected.append(error)
            return
        self._valid.add(update.agent)
        accepted = self._norms.accepts(update)
        if self._means is None:
            self._kept.append(update)
        elif accepted:
            for name, mean in self._means.items():
                mean.add(update.vectors[name], largest[name])
        else:
            self._waiting.put(update.agent, update.vectors)

    def close(self) -> tuple[Sequence[AgentUpdate], list[UpdateError]]:
        """The accepted updates, sorted by agent or summed, and an error for each rejected one."""
        too_large = self._norms.rejected()
        rejected = sorted(self._rejected, key=lambda error: error.agent)
        rejected += [
            UpdateError(agent, self._round, reason, Fault.NORM)
            for agent, reason in sorted(too_large.items())
        ]
        accepted = tuple(sorted(self._valid - too_large.keys()))
        if self._means is None:
            kept = sorted(self._kept, key=lambda update: update.agent)
            return [update for update in kept if update.agent not in too_large], rejected
        for agent in accepted:
            if agent in self._waiting:
                waited = self._waiting.get(agent)
                for name, mean in self._means.items():
                    mean.add(waited[name])
        self._waiting.close()
        means = {name: mean.take() for name, mean in self._means.items()} if accepted else {}
        return SummedUpdates(accepted, means), rejected


def screen(
    updates: Iterable[AgentUpdate],
    expected: State,
    round: int,
    *,
    cohort: Collection[int] | None = None,
    max_norm: float | None = None,
) -> tuple[Sequence[AgentUpdate], list[UpdateError]]:
    """The valid updates, sorted by agent, and an error for each rejected one."""
    incoming = Incoming(expected, round, cohort=cohort, max_norm=max_norm)
    for update in updates:
        incoming.add(update)
    return incoming.close()
