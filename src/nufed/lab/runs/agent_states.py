"""Agents' states on disk, one sealed file per agent and round, with a bounded cache in memory.

::

    states/000040/7123.safetensors      the state of agent 7123 after round 40

A state is written when it is evicted from the cache, or before the checkpoint that it belongs to,
which commits it: on resume, files newer than the checkpoint are removed. An agent has at most three
files: the newest that each of the two kept checkpoints needs, and a newer one; with
``keep = "best"`` also those that the checkpoints of the best rounds need.

:func:`write_personal` writes an agent's personal model, in the run directory of a simulation or at
its site.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nufed.algorithms.protocol import AgentContext, Algorithm, State
from nufed.errors import RunError
from nufed.lab.files import cannot_write, make_private, read_sealed, seal, sync, write_sealed
from nufed.server import on_device

FOLDER = "states"
CACHE_BYTES = 32 * 2**20
SYNC_THREADS = 16
OVERHEAD = 1024  # approximate bytes of a cached state in addition to its vectors
KEEP_LAST = 2  # checkpoints


def kept_rounds(rounds: Sequence[int], best: Callable[[int], int | None]) -> list[int]:
    """The rounds whose checkpoints are kept: the last two, and for each of them ``best`` of it."""
    last = sorted(rounds)[-KEEP_LAST:]
    return sorted(set(rounds) & {*last, *(best(round) for round in last)})


def no_best(round: int) -> None:
    """No round but the last ones is kept."""


@dataclass(frozen=True)
class Inventory:
    """Summary of the states that a checkpoint needs, to detect missing files.

    Args:
        agents: number of agents that have a state.
        rounds: sum of the rounds of their newest states.
    """

    agents: int = 0
    rounds: int = 0


class StoredStates:
    """Agents' states in a part's directory (an :class:`~nufed.server.AgentStates`).

    Args:
        folder: the part's directory.
        belongs_to: digests of the configuration, data and split, which every file must match.
        kept: the rounds of the checkpoints in that directory, ascending; training resumes from the
            last, and newer states are ignored.
        cache_bytes: size of the cache in memory.
        best: the earlier round that is kept for a checkpoint's; None: none.
        device: where states that are read are placed.
    """

    def __init__(
        self,
        folder: Path,
        belongs_to: Mapping[str, str],
        kept: Sequence[int] = (),
        cache_bytes: int = CACHE_BYTES,
        best: Callable[[int], int | None] = no_best,
        device: str | torch.device = "cpu",
    ) -> None:
        self._best, self._device = best, device
        self._part, self._folder = folder, folder / FOLDER
        self._belongs_to, self._kept, self._limit = dict(belongs_to), list(kept), cache_bytes
        self._cache: OrderedDict[int, tuple[int, State]] = OrderedDict()  # with the round
        self._cached_bytes = 0
        self._dirty: set[int] = set()  # agents whose cached state is not on disk
        self._unsynced: set[Path] = set()  # files and directories
        self._rounds: dict[int, tuple[int, ...]] = {}  # of each agent's files, ascending
        for round in self._folders():
            if round <= max(kept, default=0):
                for agent in self._numbers(self._round_folder(round), ".safetensors"):
                    self._rounds[agent] = (*self._rounds.get(agent, ()), round)
        self._sum = sum(rounds[-1] for rounds in self._rounds.values())

    def begin(self, expected: Inventory) -> None:
        """Remove states newer than the last checkpoint, and check that no file is missing."""
        for round in self._folders():
            if round > max(self._kept, default=0):
                folder = self._round_folder(round)
                for agent in self._numbers(folder, ".safetensors"):
                    self._remove(agent, round)
        if self._inventory() != expected:
            raise RunError(
                f"{self._folder} has states of {len(self._rounds)} agents, which do not match the "
                f"checkpoint of round {max(self._kept, default=0)}: {self._what_to_do()}"
            )

    def get(self, agent: int) -> State | None:
        """The agent's newest state; None if it has none."""
        if agent in self._cache:
            self._cache.move_to_end(agent)
            return self._cache[agent][1]
        if agent not in self._rounds:
            return None
        round = self._rounds[agent][-1]
        state = self._read(agent, round)
        self._keep(agent, round, state)
        return state

    def put(self, round: int, states: Mapping[int, State]) -> None:
        """Store the states after a round; empty ones are skipped."""
        for agent, state in states.items():
            if state:
                self._dirty.add(agent)
                self._keep(agent, round, {name: _compact(v) for name, v in state.items()})

    def flush(self, round: int) -> Inventory:
        """Write dirty states durably, before the checkpoint of ``round`` is written."""
        for agent in sorted(self._dirty):
            self._write(agent, *self._cache[agent])
        self._dirty.clear()
        paths = sorted(path for path in self._unsynced if path.exists())  # some were removed since
        _sync([path for path in paths if not path.is_dir()])
        _sync([path for path in paths if path.is_dir()])
        self._unsynced.clear()
        if round not in self._kept:
            self._kept = kept_rounds([*self._kept, round], self._best)
        return self._inventory()

    def agents(self) -> Iterator[int]:
        """The agents that have a state, ascending."""
        return iter(sorted(self._rounds.keys() | self._dirty))

    def prune(self) -> None:
        """Remove every file that no checkpoint needs; otherwise done when an agent's is written."""
        for agent, rounds in self._rounds.items():
            self._rounds[agent] = self._prune(agent, rounds)

    def _keep(self, agent: int, round: int, state: State) -> None:
        """Put a state into the cache, evicting the least recently used."""
        if agent in self._cache:
            self._cached_bytes -= _bytes(self._cache.pop(agent)[1])
        self._cache[agent] = round, state
        self._cached_bytes += _bytes(state)
        while self._cached_bytes > self._limit:
            oldest, (written, old) = self._cache.popitem(last=False)
            self._cached_bytes -= _bytes(old)
            if oldest in self._dirty:
                self._write(oldest, written, old)
                self._dirty.remove(oldest)

    def _write(self, agent: int, round: int, state: State) -> None:
        before = self._rounds.get(agent, ())
        path = self._path(agent, round)
        about = {"agent": agent, "round": round, "belongs_to": self._belongs_to}
        rounds = self._prune(agent, before)
        try:
            if not path.parent.exists():
                make_private(path.parent)
                self._unsynced |= {self._part, self._folder}
            with path.open("wb") as file:  # no temporary name: only a checkpoint commits it
                for piece in seal(about, state):
                    file.write(piece)
        except OSError as error:
            raise cannot_write(path, error) from error
        self._unsynced |= {path, path.parent}
        self._rounds[agent] = (*rounds, round)
        self._sum += round - (before[-1] if before else 0)

    def _read(self, agent: int, round: int) -> State:
        path = self._path(agent, round)
        try:
            sealed = read_sealed(path)
        except RunError as error:
            raise RunError(f"{error}; {self._what_to_do()}") from error
        about = {"agent": agent, "round": round, "belongs_to": self._belongs_to}
        for key, value in about.items():
            if sealed.about.get(key) != value:
                raise RunError(
                    f"{path} is not the state of agent {agent} after round {round} of this run, "
                    f"its {key} differs; {self._what_to_do()}"
                )
        return on_device(sealed.tensors, self._device)

    def _prune(self, agent: int, rounds: tuple[int, ...]) -> tuple[int, ...]:
        """Remove the agent's files that no checkpoint needs; return the rounds of the others."""
        needed = {max((r for r in rounds if r <= kept), default=0) for kept in self._kept}
        for round in rounds:
            if round not in needed:
                self._remove(agent, round)
        return tuple(round for round in rounds if round in needed)

    def _remove(self, agent: int, round: int) -> None:
        path = self._path(agent, round)
        self._unsynced.discard(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from error
        with suppress(OSError):  # not empty
            path.parent.rmdir()

    def _inventory(self) -> Inventory:
        return Inventory(len(self._rounds), self._sum)

    def _what_to_do(self) -> str:
        return (
            f"restore it from a backup, or remove {self._part} and continue with `nufed run "
            "--resume`, which trains it again"
        )

    def _folders(self) -> list[int]:
        return sorted(self._numbers(self._folder, ""))

    def _round_folder(self, round: int) -> Path:
        return self._folder / f"{round:06d}"

    def _path(self, agent: int, round: int) -> Path:
        return self._round_folder(round) / f"{agent}.safetensors"

    @staticmethod
    def _numbers(folder: Path, suffix: str) -> Iterable[int]:
        """The entries of a directory whose names are numbers, as numbers."""
        try:
            names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        except OSError as error:
            raise RunError(f"{folder} can't be read: {error.strerror}") from error
        stems = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
        return [int(stem) for stem in stems if stem.isascii() and stem.isdecimal()]


def _sync(paths: Sequence[Path]) -> None:
    """Sync files or directories; many concurrently, so that the file system batches the commits."""
    if len(paths) < SYNC_THREADS:
        for path in paths:
            _sync_one(path)
        return
    with ThreadPoolExecutor(SYNC_THREADS) as pool:
        list(pool.map(_sync_one, paths))


def _sync_one(path: Path) -> None:
    try:
        sync(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _compact(vector: Tensor) -> Tensor:
    """The vector, copied if it is a view that keeps a larger storage alive."""
    return vector if vector.untyped_storage().nbytes() == vector.nbytes else vector.clone()


def _bytes(state: State) -> int:
    return OVERHEAD + sum(vector.nbytes for vector in state.values())


PERSONAL = "personal"


def personal_after(
    algorithm: Algorithm,
    context: AgentContext,
    received: State,
    state: State | None,
    steps: int,
    scale: float = 1.0,
) -> State:
    """An agent's personal model after ``steps`` fine-tuning steps, as evaluation scores it.

    ``scale`` multiplies their step size; results show the scale that evaluation chose. 0: no step.
    """
    steps = steps if scale else 0
    personal = algorithm.personal_model(context, received, state)
    *_, last = algorithm.fine_tune(context, received, personal.tensors, steps, scale)
    return last


def write_personal(folder: Path, agent: int, tensors: State, about: Mapping[str, Any]) -> Path:
    """Write an agent's personal model as a sealed file ``personal/AGENT.safetensors``.

    Args:
        folder: of the method and seed, or of the run at a site.
        agent: whose model it is.
        tensors: the personal model.
        about: its metadata, as JSON: the round, fine-tuning steps and the scale of their size.
    """
    path = folder / PERSONAL / f"{agent}.safetensors"
    try:
        make_private(path.parent)
    except OSError as error:
        raise RunError(f"{path.parent} can't be created: {error.strerror}") from error
    write_sealed(path, {"agent": agent, **about}, tensors)
    return path
