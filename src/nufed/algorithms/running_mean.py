"""The uniform mean of vectors that arrive one by one, in any order and memory of constant size."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from nufed.algorithms.fixed_point import PIECE, FixedPointGrid, FixedPointSum, peak


class RunningMean:
    """The mean of vectors that agents send in place of ``before``; any order gives the same bits.

    Its sum takes 8 bytes per number. Where it exceeds 2⁶² units of the grid, and in float64, 16
    more are taken for these pieces of the vector.

    >>> mean = RunningMean(torch.zeros(2))
    >>> for vector in (torch.tensor([0.0, 3.0]), torch.tensor([1.0, 4.0])):
    ...     mean.add(vector)
    >>> mean.take()
    tensor([0.5000, 3.5000])
    """

    def __init__(self, before: Tensor, grid: FixedPointGrid | None = None) -> None:
        grid = FixedPointGrid.of(before) if grid is None else grid
        parts = torch.split(before.detach().flatten(), PIECE)
        longest = max((part.numel() for part in parts), default=0)
        buffer = torch.empty(longest, dtype=torch.float64, device=before.device)
        self._shape, self._dtype, self._device = before.shape, before.dtype, before.device
        self._sums = [FixedPointSum(part, grid, buffer) for part in parts]

    def add(self, vector: Tensor, largest: float | None = None) -> None:
        """Add one vector; ``largest`` is its largest magnitude, if known."""
        largest = peak(vector) if largest is None else largest
        pieces = torch.split(vector.detach().flatten(), PIECE)
        for total, piece in zip(self._sums, pieces, strict=True):
            total.add(piece, largest)

    def take(self) -> Tensor:
        """The mean; frees the memory of the sum, piece by piece."""
        mean = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        for part in torch.split(mean.view(-1), PIECE):
            self._sums.pop(0).mean(part)
        return mean


def fixed_point_mean(vectors: Iterable[Tensor], before: Tensor) -> Tensor:
    """The mean of vectors that are all there, as :class:`RunningMean` takes it."""
    mean = RunningMean(before)
    for vector in vectors:
        mean.add(vector)
    return mean.take()
