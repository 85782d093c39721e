"""Memory shared by worker processes."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from nufed.algorithms.protocol import State
from nufed.simulation.worker_pool import start_method

Layout: TypeAlias = list[tuple[str, int, torch.Size, torch.dtype]]
"""The layout of a state in a buffer: name, byte offset, shape and dtype of each vector."""


def shared_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in memory shared with processes forked from this one.

    Pages are allocated on first write.
    """
    numbers = prod(shape)
    memory = mmap.mmap(-1, max(1, numbers * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=numbers).view(*shape)


def shared_bytes(size: int) -> Tensor:
    """Zero bytes in memory shared with processes forked from this one, or spawned with it."""
    if start_method() == "fork":
        return shared_zeros((size,), torch.uint8)
    zeros = torch.zeros(size, dtype=torch.uint8)
    zeros.share_memory_()  # type: ignore[no-untyped-call]
    return zeros


class Buffer(Protocol):
    """Through what workers exchange states with their parent."""

    size: int

    def write(self, state: State, span: range) -> Any:
        """Make a state readable for the other side; returns what a task or result holds of it."""
        ...

    def read(self, layout: Any) -> State:
        """A copy of the state that :meth:`write` was given."""
        ...


class SharedBuffer:
    """Shared memory through which processes exchange states."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bytes = shared_bytes(max(size, 64))

    def write(self, state: State, span: range) -> Layout | State:
        """Write a state into a span of bytes and return its layout; if too large, the state."""
        if aligned_bytes(state) > len(span):
            return state
        layout, start = [], span.start
        for name, vector in state.items():
            layout.append((name, start, vector.shape, vector.dtype))
            self._view(layout[-1]).copy_(vector)
            start += aligned_bytes({name: vector})
        return layout

    def read(self, layout: Layout | State) -> State:
        """A copy of the state that :meth:`write` was given."""
        if isinstance(layout, Mapping):
            return layout
        return {entry[0]: self._view(entry).clone() for entry in layout}

    def _view(self, entry: tuple[str, int, torch.Size, torch.dtype]) -> Tensor:
        _, start, shape, dtype = entry
        return self._bytes[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def aligned_bytes(state: State) -> int:
    """The bytes that a state takes in a buffer, each vector aligned to cache lines."""
    return sum(-(-vector.nbytes // 64) * 64 for vector in state.values())
