"""Memory that forked processes share."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def shared_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that processes forked from this one see and change too.

    Pages are taken from the system when they are first written.
    """
    numbers = prod(shape)
    memory = mmap.mmap(-1, max(1, numbers * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=numbers).view(*shape)
