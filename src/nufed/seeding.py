"""Random streams: every draw comes from a named generator, independent of all others.

A draw depends on the run's seed, its purpose, and round, agent and local step, and on nothing
else: not on the method, the order of agents, the number of workers, or earlier draws. Methods
compared in one run therefore get the same splits, cohorts and batches.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence


def stream(
    seed: int, purpose: str, round: int = 0, agent: int = 0, step: int = 0
) -> np.random.Generator:
    """The random generator for one purpose, round, agent and local step.

    The key of a counter-based generator (Philox) is the SHA-256 of all five arguments, so that
    streams that differ in any argument are independent.

    >>> first, again = (stream(0, "cohort", round=3).integers(100, size=3) for _ in range(2))
    >>> (first == again).all()
    np.True_
    >>> (first == stream(0, "cohort", round=4).integers(100, size=3)).all()
    np.False_
    """
    name = f"{seed:d}/{purpose}/{round:d}/{agent:d}/{step:d}".encode()
    key = np.frombuffer(hashlib.sha256(name).digest()[:16], dtype="<u8")
    return np.random.Generator(np.random.Philox(_Key(key)))  # type: ignore[arg-type]


class _Key(ISeedSequence):
    """Passes a key to a bit generator; ``key=`` would gather system entropy first, unused."""

    def __init__(self, key: np.ndarray[Any, Any]) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return self._key


def torch_seed(generator: np.random.Generator) -> int:
    """A seed for torch (dropout masks, initial weights), drawn from ``generator``."""
    return int(generator.integers(2**63))
