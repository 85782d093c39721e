"""The one way to draw randomness: a named, independent stream for every purpose and place.

A draw depends on the run's seed, what it is for, and where it happens (round, agent, local step),
and on nothing else: not on the method, the order of agents, the number of workers, or how much was
drawn before. Methods compared in one run therefore meet the same splits, cohorts and batches.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence


def stream(
    seed: int, purpose: str, round: int = 0, agent: int = 0, step: int = 0
) -> np.random.Generator:
    """An independent random generator for one purpose at one place.

    The key of a counter-based generator (Philox) is the SHA-256 of all five arguments, so that
    streams with any differing argument are independent.

    >>> first, again = (stream(0, "cohort", round=3).integers(100, size=3) for _ in range(2))
    >>> (first == again).all()
    np.True_
    >>> (first == stream(0, "cohort", round=4).integers(100, size=3)).all()
    np.False_
    """
    place = f"{seed:d}/{purpose}/{round:d}/{agent:d}/{step:d}".encode()
    key = np.frombuffer(hashlib.sha256(place).digest()[:16], dtype="<u8")
    return np.random.Generator(np.random.Philox(_Key(key)))  # type: ignore[arg-type]


class _Key(ISeedSequence):
    """Hands a key to a bit generator; giving it as ``key=`` gathers entropy first, for nothing."""

    def __init__(self, key: np.ndarray[Any, Any]) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return self._key


def torch_seed(generator: np.random.Generator) -> int:
    """A seed for torch (dropout masks, initial weights), drawn from ``generator``."""
    return int(generator.integers(2**63))
