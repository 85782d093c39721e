"""Capacity levels: the width and depth of sub-networks, and the level of each agent."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate

from nufed.errors import require

AUTO = "auto"


@dataclass(frozen=True)
class CapacityLevels:
    """Nested levels of capacity, counted from 0; the last is the whole network.

    Args:
        widths: the share of units of each hidden layer, by level.
        depths: the number of exits, by level; empty: in proportion to the level.
        shares: the relative numbers of agents, by level.
    """

    widths: tuple[Fraction, ...]
    depths: tuple[int, ...]
    shares: tuple[Fraction, ...]

    @classmethod
    @lru_cache(maxsize=64)  # called for each agent in each round
    def read(cls, widths: str, depths: str, shares: str) -> CapacityLevels:
        """Parse numbers that are separated by commas; ``depths`` may be "auto"."""
        texts = {"widths": widths, "depths": depths, "shares": shares}
        if depths == AUTO:
            texts["depths"] = ", ".join("1" for _ in widths.split(","))
        found = {name: _numbers(name, text) for name, text in texts.items()}
        levels = len(found["widths"])
        for name, numbers in found.items():
            allowed = f"must have one number for each of the {levels} levels in widths"
            require(len(numbers) == levels, name, texts[name], allowed)
        s, e, n = found.values()
        ok = s[0] > 0 and list(s) == sorted(s) and s[-1] == 1
        require(ok, "widths", widths, "must be above 0, in ascending order, and end with 1")
        ok = all(depth >= 1 and depth.denominator == 1 for depth in e) and list(e) == sorted(e)
        require(ok, "depths", depths, "must be whole numbers, 1 or more, in ascending order")
        require(sum(n) > 0, "shares", shares, "must not all be 0")
        return cls(s, () if depths == AUTO else tuple(map(int, e)), n)

    def depths_of(self, exits: int) -> tuple[int, ...]:
        """The number of exits by level, for a model with ``exits`` of them.

        >>> CapacityLevels.read("0.5, 1", "auto", "1, 1").depths_of(3)
        (2, 3)
        """
        levels = len(self.widths)
        return self.depths or tuple(-(-level * exits // levels) for level in range(1, levels + 1))

    def of(self, agent: int) -> int:
        """The level of an agent: a fixed function of its number i = …b₂b₁b₀ (binary).

        [0, 1) is divided in proportion to ``shares``; the level is the index of the interval that
        holds 0.b₀b₁b₂… (van der Corput's sequence), so that any run of consecutive agents has about
        these shares.

        >>> levels = CapacityLevels.read("0.5, 0.5, 1", "1, 2, 3", "1, 1, 2")
        >>> [levels.of(agent) for agent in range(8)]
        [0, 2, 1, 2, 0, 2, 1, 2]
        """
        return self._of(agent)

    @cached_property
    def _of(self) -> Callable[[int], int]:
        return lru_cache(maxsize=2**16)(self._level)  # called for each agent in each round

    def _level(self, agent: int) -> int:
        point = Fraction(int(f"{agent:b}"[::-1], 2), 2 ** agent.bit_length())
        ends = list(accumulate(self.shares))
        return bisect_right(ends, point * ends[-1])


def _numbers(name: str, text: str) -> tuple[Fraction, ...]:
    parts = [part.strip() for part in text.split(",")]
    ok = all(re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", part) for part in parts)
    require(ok, name, text, 'must be numbers, 0 or more, separated by commas, as "0.5, 1"')
    return tuple(map(Fraction, parts))
