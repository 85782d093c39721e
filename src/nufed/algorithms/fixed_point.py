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
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BOUND_BITS = 16  # log₂(bound / s)
UNIT_BITS = 40  # log₂(s / u)
UNIT_BITS_FLOAT64 = 72
EXACT = 2.0**53  # integers up to it are exact in float64
RADIX_BITS = 44
RADIX = 2.0**RADIX_BITS
PIECE = 2**17  # numbers of a vector that are added at once
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

    def decode(
        self, total: Tensor, count: int, dtype: torch.dtype, buffer: Tensor | None = None
    ) -> Tensor:
        """The mean from the sum of the integers, computed in float64 and rounded to ``dtype``."""
        return torch.div(total, count / self.unit, out=buffer).to(dtype)


class FixedPointSum:
    """The sum of vectors on a grid, in memory that their number does not change.

    Integers are added in float64 while these sums are exact; beyond that, and always for models in
    float64, in two 64-bit limbs: high·2⁴⁴ + low.

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
        self._total = torch.zeros_like(before, dtype=torch.float64)
        if buffer is None:  # reused: allocation is slow
            buffer = torch.empty(before.numel(), dtype=torch.float64)
        self._integers = buffer[: before.numel()].view(before.shape)
        self._room = EXACT  # what may still be added to it exactly
        self._limbs: tuple[Tensor, Tensor] | None = None
        self._wide_additions = 0
        self.count = 0

    def add(self, vector: Tensor, largest: float) -> None:
        """Add one vector whose numbers have magnitudes up to ``largest``."""
        self.count += 1
        integers = self._grid.encode(vector, self._integers)
        largest = largest / self._grid.unit + 1  # of the integers
        if largest > EXACT:
            self._add_wide(integers)
            return
        if largest > self._room:
            self._add_wide(self._total)
            self._total.zero_()
            self._room = EXACT
        self._total.add_(integers)
        self._room -= largest

    def mean(self) -> Tensor:
        """The mean of the vectors, in their precision."""
        total = self._total
        if self._limbs is not None:
            self._add_wide(total)
            self._total.zero_()
            total = from_limbs(*self._limbs)
        return self._grid.decode(total, self.count, self._dtype, self._integers)

    def _add_wide(self, integers: Tensor) -> None:
        high, low = to_limbs(integers)
        if self._limbs is None:
            self._limbs = torch.zeros_like(high), torch.zeros_like(low)
        self._limbs[0].add_(high)
        self._limbs[1].add_(low)
        self._wide_additions += 1
        if self._wide_additions % CARRY_EVERY == 0:
            self._limbs = carried(*self._limbs)


def peak(vector: Tensor) -> float:
    """The largest magnitude; 0 of an empty vector."""
    if vector.numel() == 0:
        return 0.0
    least, most = torch.aminmax(vector.detach())
    return max(-float(least), float(most))


def to_limbs(integers: Tensor) -> tuple[Tensor, Tensor]:
    """Integers held in float64, below 2¹⁰⁷, as high·2⁴⁴ + low with 0 ≤ low < 2⁴⁴, in int64."""
    high = (integers / RADIX).floor_()
    return high.long(), (integers - high * RADIX).long()


def carried(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """The same integers with 0 ≤ low < 2⁴⁴."""
    carry = low >> RADIX_BITS
    return high + carry, low - (carry << RADIX_BITS)


def from_limbs(high: Tensor, low: Tensor) -> Tensor:
    """The integers high·2⁴⁴ + low, rounded to float64; depends on their values only."""
    high, low = carried(high, low)
    return high.double() * RADIX + low.double()
