"""An order-independent sum: vectors on a fixed-point grid, added as integers.

Integer addition is associative, so the same vectors give the same bits in any order, and masked
integers (secure aggregation) give those of plain ones. The grid of a round follows from the vector
w that the server broadcasts, so that server, sites and simulation derive the same one:

    scale s   the power of two with s/2 < max(1, max|w|) ≤ s
    unit u    2⁻⁴⁰s for models in float32 and half precision, 2⁻⁷²s in float64
    bound     2¹⁶s: a vector with a number beyond it is refused (:mod:`nufed.server.checks`)

A number y becomes the integer round(y/u). Numbers of at least 2⁻¹⁷s (float32) or 2⁻²⁰s (float64)
are multiples of u already, so the mean is exact, but for its last rounding to the model's
precision, where all agents' |y| are that large. Elsewhere its error is at most u/2. So it exceeds
1e-7 (float32) or 1e-13 (float64) of a coordinate's movement only where some |y| is smaller than
that and the movement is below 4.6e-6·s (float32) or 1.1e-9·s (float64).

So a uniform mean takes vectors one by one, in any order, and memory of constant size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BOUND_BITS = 16  # log₂(bound / s)
UNIT_BITS = 40  # log₂(s / u)
UNIT_BITS_FLOAT64 = 72
ROUNDING = 1.5 * 2.0**52  # its sum with a number up to 2⁵¹ rounds that to the nearest integer
ROUNDED = 2.0**51
ROOM = 2.0**62  # of a sum in 64 bits, with one bit to spare
RADIX_BITS = 44
RADIX = 2.0**RADIX_BITS
WIDEST = 2.0**106  # far beyond the bound, for integers in two limbs
PIECE = 2**18  # numbers of a vector that are added at once
CARRY_EVERY = 2**16  # wide additions before a carry: 2¹⁶·2⁴⁴ is far below 2⁶³


@dataclass(frozen=True)
class FixedPointGrid:
    """The grid of a round: numbers are rounded to multiples of ``unit``, up to ``bound``."""

    unit: float
    bound: float

    @classmethod
    def of(cls, before: Tensor) -> FixedPointGrid:
        """The grid for vectors that agents send in place of the server's vector ``before``.

        >>> FixedPointGrid.of(torch.tensor([0.1, -3.0])).bound == 4 * 2**16
        True
        """
        largest = peak(before)
        mantissa, exponent = math.frexp(max(1.0, largest) if math.isfinite(largest) else 1.0)
        scale = 2.0 ** (exponent - (mantissa == 0.5))
        bits = UNIT_BITS_FLOAT64 if before.dtype == torch.float64 else UNIT_BITS
        return cls(scale * 2.0**-bits, scale * 2.0**BOUND_BITS)

    def encode(self, vector: Tensor, out: Tensor | None = None) -> Tensor:
        """The integers round(y/u), held exactly in float64."""
        wide = torch.empty_like(vector, dtype=torch.float64) if out is None else out
        return wide.copy_(vector.detach()).mul_(1 / self.unit).round_()

    def decode(self, total: Tensor, count: int, out: Tensor | None = None) -> Tensor:
        """The mean in float64 from the sum of the integers."""
        return torch.div(total, count / self.unit, out=out)


class FixedPointSum:
    """The sum of vectors on a grid, in memory that their number does not change.

    Integers are added in 64 bits while they fit; beyond that, as usual for models in float64, in
    two 64-bit limbs: high·2⁴⁴ + low. Those below 2⁵¹ need no rounding of their own: in float64 the
    bits of R·u + y, with R = 1.5·2⁵², are those of R·u plus the integer round(y/u).

    Args:
        before: the server's vector.
        grid: that of a longer vector of which these are parts; None: that of ``before``.
        buffer: in float64, at least as long, which several sums may share.
    """

    def __init__(
        self,
        before: Tensor,
        grid: FixedPointGrid | None = None,
        buffer: Tensor | None = None,
    ) -> None:
        self._dtype, self._grid = before.dtype, grid or FixedPointGrid.of(before)
        self._total = torch.zeros_like(before, dtype=torch.int64)
        if buffer is None:  # reused: allocation is slow
            buffer = torch.empty(before.numel(), dtype=torch.float64, device=before.device)
        self._buffer = buffer[: before.numel()].view(before.shape)
        self._rounding = ROUNDING * self._grid.unit
        self._offset = 0  # the bits of ``_rounding`` that are in the total, modulo 2⁶⁴
        self._room = ROOM  # what may still be added to the total
        self._limbs: tuple[Tensor, Tensor] | None = None
        self._wide_additions = 0
        self._finite = True  # false: a vector was not, or far beyond the bound
        self.count = 0

    def add(self, vector: Tensor, largest: float) -> None:
        """Add one vector whose numbers have magnitudes up to ``largest``."""
        self.count += 1
        largest = largest / self._grid.unit + 1  # of the integers
        if not largest < WIDEST:
            self._finite = False
            return
        if largest > ROOM:
            self._add_limbs(*to_limbs(self._grid.encode(vector, self._buffer)))
            return
        if largest > self._room:
            self._empty_total()
        self._room -= largest
        if largest < ROUNDED:
            self._buffer.copy_(vector.detach()).add_(self._rounding)
            add_integers(self._total, self._buffer.view(torch.int64))
            self._offset += int(np.float64(self._rounding).view(np.int64))
        else:
            add_integers(self._total, self._grid.encode(vector, self._buffer).long())

    def mean(self, out: Tensor | None = None) -> Tensor:
        """The mean of the vectors, in their precision; NaN if one has no place on the grid."""
        out = torch.empty_like(self._total, dtype=self._dtype) if out is None else out
        if not self._finite:
            return out.fill_(math.nan)
        return out.copy_(self._grid.decode(self._sum(), self.count, self._buffer))

    def _sum(self) -> Tensor:
        """The sum of the integers, rounded to float64."""
        if self._limbs is not None:
            self._empty_total()
            return from_limbs(*self._limbs)
        self._subtract_offset()
        return self._buffer.copy_(self._total)

    def _subtract_offset(self) -> None:
        wrapped = (-self._offset + 2**63) % 2**64 - 2**63
        add_integers(self._total, torch.tensor(wrapped, device=self._total.device))
        self._offset = 0

    def _empty_total(self) -> None:
        """Move the total to the limbs."""
        self._subtract_offset()
        self._add_limbs(*carried(torch.zeros_like(self._total), self._total))
        self._total.zero_()
        self._room = ROOM

    def _add_limbs(self, high: Tensor, low: Tensor) -> None:
        if self._limbs is None:
            self._limbs = torch.zeros_like(high), torch.zeros_like(low)
        self._limbs[0].add_(high)
        self._limbs[1].add_(low)
        self._wide_additions += 1
        if self._wide_additions % CARRY_EVERY == 0:
            self._limbs = carried(*self._limbs)


def add_integers(total: Tensor, integers: Tensor) -> None:
    """Add 64-bit integers modulo 2⁶⁴, in place; on a CPU numpy is three times as fast as torch."""
    if total.device.type == "cpu":
        numbers = total.numpy()
        np.add(numbers, integers.numpy(), out=numbers)
    else:
        total.add_(integers)


WITHOUT_FLOAT64 = {"mps"}  # devices


def where_wide(vector: Tensor) -> Tensor:
    """The vector where float64 exists: itself, or a copy on the CPU."""
    return vector.cpu() if vector.device.type in WITHOUT_FLOAT64 else vector


def peak(vector: Tensor) -> float:
    """The largest magnitude; 0 of an empty vector."""
    if vector.numel() == 0:
        return 0.0
    ends: list[float] = torch.stack(torch.aminmax(vector.detach())).tolist()  # one copy to the host
    return max(-ends[0], ends[1])


def to_limbs(integers: Tensor) -> tuple[Tensor, Tensor]:
    """Integers held in float64, up to 2¹⁰⁶, as high·2⁴⁴ + low with 0 ≤ low < 2⁴⁴, in int64."""
    high = (integers / RADIX).floor_()
    return high.long(), (integers - high * RADIX).long()


def carried(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised limbs of the same integers: 0 ≤ low < 2⁴⁴."""
    carry = low >> RADIX_BITS
    return high + carry, low - (carry << RADIX_BITS)


def from_limbs(high: Tensor, low: Tensor) -> Tensor:
    """The integers high·2⁴⁴ + low, rounded to float64; depends on their values only."""
    high, low = carried(high, low)
    return high.double() * RADIX + low.double()


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
        wide = where_wide(before.detach().flatten())
        parts = torch.split(wide, PIECE)
        longest = max((part.numel() for part in parts), default=0)
        buffer = torch.empty(longest, dtype=torch.float64, device=wide.device)
        self._shape, self._dtype, self._device = before.shape, before.dtype, before.device
        self._sums = [FixedPointSum(part, grid, buffer) for part in parts]

    def add(self, vector: Tensor, largest: float | None = None) -> None:
        """Add one vector; ``largest`` is its largest magnitude, if known."""
        largest = peak(vector) if largest is None else largest
        pieces = torch.split(where_wide(vector.detach().flatten()), PIECE)
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
