"""Memory that forked processes share."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from nufed.algorithm import State

Layout: TypeAlias = list[tuple[str, int, torch.Size, torch.dtype]]
"""Where the vectors of a state lie in a board: name, first byte, shape and dtype of each."""


def shared_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that processes forked from this one see and change too.

    Pages are taken from the system when they are first written.
    """
    numbers = prod(shape)
    memory = mmap.mmap(-1, max(1, numbers * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=numbers).view(*shape)


class Board:
    """Shared memory in which processes leave states for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bytes = shared_zeros((max(size, 64),), torch.uint8)

    def put(self, state: State, room: range) -> Layout | State:
        """Write a state into these bytes and say where; if there is no room, give it back."""
        if room_for(state) > len(room):
            return state
        layout, start = [], room.start
        for name, vector in state.items():
            layout.append((name, start, vector.shape, vector.dtype))
            self._view(layout[-1]).copy_(vector)
            start += room_for({name: vector})
        return layout

    def take(self, layout: Layout | State) -> State:
        """A copy of what :meth:`put` was given."""
        if isinstance(layout, Mapping):
            return layout
        return {place[0]: self._view(place).clone() for place in layout}

    def _view(self, place: tuple[str, int, torch.Size, torch.dtype]) -> Tensor:
        _, start, shape, dtype = place
        return self._bytes[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def room_for(state: State) -> int:
    """The bytes that a state takes on a board."""
    return sum(-(-vector.nbytes // 64) * 64 for vector in state.values())  # on whole cache lines
