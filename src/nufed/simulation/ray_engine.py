"""The worker engine on a cluster of Ray: vectors go through Ray's object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
import torch

from nufed.algorithms.protocol import State
from nufed.simulation.engine import Engine
from nufed.simulation.ray_cluster import RayCluster, ray_package
from nufed.simulation.worker_engine import WorkerEngine


class RayEngine(WorkerEngine):
    """A worker engine whose processes are actors of a cluster.

    Algorithms and measures are sent when they are first used, so that no actor is restarted.
    """

    def __init__(self, cluster: RayCluster, engine: Engine, rebuild: Callable[[], Engine]) -> None:
        super().__init__(engine, cluster.slots, rebuild)
        self._cluster: RayCluster | None = cluster
        self._buffer = ObjectStore()
        self._sent: list[tuple[object, Any]] = []  # objects, and their references
        self._got: dict[Any, Any] = {}  # in an actor

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_cluster": None, "_sent": [], "_objects": []}

    def _prepare(self, objects: list[object], sizes: list[int]) -> Iterator[range]:
        if self._workers is None:
            assert self._cluster is not None
            self._workers = self._cluster.workers(self._work)
        return repeat(range(0))

    def _index(self, thing: object) -> Any:
        for known, reference in self._sent:
            if known is thing:
                return reference
        self._sent.append((thing, ray_package().put(thing)))
        return self._sent[-1][1]

    def _object(self, index: Any) -> Any:
        if index not in self._got:
            self._got[index] = ray_package().get(index)
        return self._got[index]


class ObjectStore:
    """Ray's object store as a :class:`~nufed.simulation.shared_memory.Buffer`.

    The driver puts a state there once, however many actors read it; an actor returns a state with
    its result, which Ray puts there.
    """

    def __init__(self) -> None:
        self.size, self._at_driver = 0, True

    def __getstate__(self) -> dict[str, Any]:
        return {"size": 0, "_at_driver": False}

    def write(self, state: State, span: range) -> Any:
        packed = [(name, v.dtype, tuple(v.shape), _bytes_of(v)) for name, v in state.items()]
        return ray_package().put(packed) if self._at_driver and packed else packed

    def read(self, layout: Any) -> State:
        packed = layout if isinstance(layout, list) else ray_package().get(layout)
        return {
            name: torch.from_numpy(content.copy()).view(dtype).view(shape)
            for name, dtype, shape, content in packed
        }


def _bytes_of(vector: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The memory of a vector; Ray moves numpy's arrays without a copy."""
    return vector.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
