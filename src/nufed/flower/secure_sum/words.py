"""Integers modulo 2⁶⁴ or 2¹²⁸ as 64-bit words, and masks from ChaCha20.

An array of words has shape (1, d) modulo 2⁶⁴ or (2, d) modulo 2¹²⁸, the low word first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from nufed.algorithms.fixed_point import (
    BOUND_BITS,
    RADIX_BITS,
    UNIT_BITS,
    FixedPointGrid,
    from_limbs,
    peak,
    to_limbs,
)
from nufed.algorithms.protocol import State
from nufed.flower.secure_sum.terms import SecureSumError

Words: TypeAlias = npt.NDArray[np.uint64]
LOW_BITS = np.int64((1 << RADIX_BITS) - 1)
HIGH_SHIFT = 64 - RADIX_BITS
KEY_BYTES = 32


def words_per_number(before: State, sites: int) -> int:
    """Words per number: 1 if the sum over ``sites`` sites fits into 64 bits, else 2."""
    wide = any(vector.dtype == torch.float64 for vector in before.values())
    return 2 if wide or sites << (BOUND_BITS + UNIT_BITS) >= 1 << 63 else 1


def encode(vectors: State, before: State, sites: int) -> Words:
    """A site's vectors on the round's grid, as words; refused beyond the grid's bound."""
    words = words_per_number(before, sites)
    parts = []
    for name, right in before.items():
        vector, grid = vectors[name].detach().cpu(), FixedPointGrid.of(right)
        if not peak(vector) <= grid.bound:  # also refuses what is not finite
            raise SecureSumError(
                f"its {name!r} has numbers beyond {grid.bound:.2g}, the bound of this round: it "
                "diverges"
            )
        high, low = (limb.flatten().numpy() for limb in to_limbs(grid.encode(vector)))
        rows = [(high << RADIX_BITS) + low, high >> HIGH_SHIFT]
        parts.append(np.stack(rows[:words]).view(np.uint64))
    return np.concatenate(parts, axis=1)


def decode_means(total: Words, before: State, sites: int) -> dict[str, Tensor]:
    """The mean vectors from the summed words of ``sites`` sites."""
    signed, start, means = total.view(np.int64), 0, {}
    for name, right in before.items():
        part = signed[:, start : start + right.numel()]
        start += right.numel()
        low = part[0] & LOW_BITS
        if len(part) == 1:
            high = part[0] >> RADIX_BITS
        else:
            carried = (part[0].view(np.uint64) >> np.uint64(RADIX_BITS)).view(np.int64)
            high = (part[1] << HIGH_SHIFT) | carried
        integers = from_limbs(torch.from_numpy(high), torch.from_numpy(low)).reshape(right.shape)
        means[name] = FixedPointGrid.of(right).decode(integers, sites).to(right)
    return means


def mask(key: bytes, shape: tuple[int, ...]) -> Words:
    """Uniform words: the ChaCha20 key stream of a key that is used for this mask only."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    count = int(np.prod(shape))
    return np.frombuffer(stream.update(bytes(8 * count)), "<u8").reshape(shape).astype(np.uint64)


def add(a: Words, b: Words) -> Words:
    """a + b modulo 2⁶⁴ or 2¹²⁸."""
    total = a + b
    if len(a) == 2:
        total[1] += total[0] < a[0]
    return total


def subtract(a: Words, b: Words) -> Words:
    """a − b modulo 2⁶⁴ or 2¹²⁸."""
    rest = a - b
    if len(a) == 2:
        rest[1] -= a[0] < b[0]
    return rest


def shape_of(before: Mapping[str, Tensor], sites: int) -> tuple[int, int]:
    """The shape of the words that encode vectors like ``before``."""
    return words_per_number(dict(before), sites), sum(v.numel() for v in before.values())
