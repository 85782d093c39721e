"""Updates that wait in a temporary file, so that they take no memory."""

from __future__ import annotations

import tempfile
import weakref
from typing import IO

import torch

from nufed.algorithms.protocol import State
from nufed.errors import RunError


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
