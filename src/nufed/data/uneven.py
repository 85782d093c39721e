"""Partitions over agents of unequal size: per-class Dirichlet and quantity skew.

Both redraw a bounded number of times until every agent has the minimum size, then move samples from
the largest agents to those that still lack some: they always terminate. Every sample is used once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from nufed.data.rows import Rows, shuffled_classes
from nufed.errors import InputError, require

Counts: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]  # samples by agent (row) and class

MAX_DRAWS = 100  # before samples are moved


def dirichlet_by_class(
    labels: Rows,
    agents: int,
    samples_per_agent: int | None,
    concentration: float,
    rng: np.random.Generator,
    min_size: int = 10,
    self_balancing: bool = False,
) -> list[Rows]:
    """Per-class Dirichlet: each class is shared out by its own draw; sizes are unequal.

    For every class k, shares p_k ~ Dir(α, …, α) over the agents, α = ``concentration``; agent j
    gets the fraction p_kj of that class (Yurochkin et al. 2019; NIID-Bench, Li et al. 2022; most
    published tables). Hsu et al. (2019) instead draw a class distribution per agent, at equal
    sizes, as :func:`nufed.data.dirichlet` does.

    Draws with an agent below ``min_size`` are rejected, up to :data:`MAX_DRAWS` times; then
    samples of their most frequent classes move from the largest agents to the smallest.

    Args:
        labels: the class of every sample.
        agents: their number.
        samples_per_agent: the mean size; a random subset of the samples is then shared out. By
            default all are.
        concentration: α.
        rng: the random generator.
        min_size: the smallest number of samples that an agent may have.
        self_balancing: an agent that has reached the mean size gets no more classes, as in the
            code (not the text) of those papers.

    >>> labels = np.arange(100) % 4
    >>> parts = dirichlet_by_class(labels, 5, None, 0.1, np.random.default_rng(0))
    >>> sum(map(len, parts)), min(map(len, parts)) >= 10
    (100, True)
    """
    require(
        isinstance(self_balancing, bool), "self_balancing", self_balancing, "must be true or false"
    )
    subset = _subset(len(labels), agents, samples_per_agent, min_size, rng)
    own = labels[subset]
    pools = shuffled_classes(own, np.unique(own), rng)
    cap = len(own) / agents if self_balancing else np.inf

    def draw() -> Counts:
        counts = np.zeros((agents, len(pools)), dtype=np.int64)
        for place, pool in enumerate(pools):
            held = counts.sum(axis=1)
            counts[:, place] = _shares(len(pool), concentration, held < cap, rng)
        return counts

    counts = _accepted(draw, min_size)
    by_class = [np.split(p, np.cumsum(c)[:-1]) for p, c in zip(pools, counts.T, strict=True)]
    return [subset[np.concatenate(pieces)] for pieces in zip(*by_class, strict=True)]


def quantity_skew(
    samples: int,
    agents: int,
    samples_per_agent: int | None,
    concentration: float,
    rng: np.random.Generator,
    min_size: int = 10,
) -> list[Rows]:
    """Quantity skew: agents' sizes follow a Dirichlet distribution, their classes are IID.

    The agents' fractions of the samples are one draw of Dir(α, …, α), α = ``concentration``
    (NIID-Bench, Li et al. 2022). Other arguments as for :func:`dirichlet_by_class`; ``samples`` is
    the number of samples, which need no classes.

    >>> parts = quantity_skew(100, 5, None, 0.5, np.random.default_rng(0))
    >>> sum(map(len, parts)), min(map(len, parts)) >= 10
    (100, True)
    """
    subset = _subset(samples, agents, samples_per_agent, min_size, rng)
    everyone = np.ones(agents, dtype=bool)

    def draw() -> Counts:
        return _shares(len(subset), concentration, everyone, rng)[:, None]

    return np.split(subset, np.cumsum(_accepted(draw, min_size))[:-1])


def _subset(
    samples: int,
    agents: int,
    samples_per_agent: int | None,
    min_size: int,
    rng: np.random.Generator,
) -> Rows:
    """The rows to share out, in random order."""
    whole = isinstance(min_size, int) and not isinstance(min_size, bool)
    require(whole and min_size >= 1, "min_size", min_size, "must be a whole number, at least 1")
    used = samples if samples_per_agent is None else agents * samples_per_agent
    if used > samples:
        raise InputError(
            f"{agents} agents with {samples_per_agent} samples on average need {used} samples and "
            f"the data has {samples}: ask for fewer agents or samples_per_agent"
        )
    if agents * min_size > used:
        raise InputError(
            f"{agents} agents with at least min_size = {min_size} samples need {agents * min_size} "
            f"samples, and {used} are shared out: ask for fewer agents, a smaller min_size or more "
            "samples_per_agent"
        )
    rows: Rows = rng.permutation(samples)[:used]
    return rows


def _shares(
    total: int, concentration: float, allowed: np.ndarray[Any, Any], rng: np.random.Generator
) -> Counts:
    """``total`` samples as one Dirichlet draw over the allowed agents shares them out."""
    drawn = np.where(allowed, rng.dirichlet(np.full(len(allowed), concentration)), 0.0)
    if not drawn.sum() >= np.finfo(float).tiny:  # nothing is left, or it underflowed
        drawn = np.zeros(len(allowed))
        drawn[rng.choice(np.flatnonzero(allowed))] = 1.0  # the limit α → 0
    ends = np.rint(np.cumsum(drawn) / drawn.sum() * total).astype(np.int64)
    ends[np.flatnonzero(drawn)[-1] :] = total  # rounding must not lose the last sample
    counts: Counts = np.diff(ends, prepend=0)
    return counts


def _accepted(draw: Callable[[], Counts], min_size: int) -> Counts:
    """The first draw whose agents all have the minimum size, or the last one after repair."""
    for _ in range(MAX_DRAWS):
        counts = draw()
        if counts.sum(axis=1).min() >= min_size:
            return counts
    return _repaired(counts, min_size)


def _repaired(counts: Counts, min_size: int) -> Counts:
    """Move samples from the largest agents to those below the minimum size.

    Each move takes at most half of the largest agent's excess, of its most frequent class, so that
    no agent gives all. Every move is of at least one sample: it terminates.
    """
    counts, sizes = counts.copy(), counts.sum(axis=1)
    for agent in np.flatnonzero(sizes < min_size):
        while sizes[agent] < min_size:
            donor = int(sizes.argmax())
            place = int(counts[donor].argmax())
            excess = (sizes[donor] - min_size + 1) // 2
            moved = min(min_size - sizes[agent], excess, counts[donor, place])
            counts[donor, place] -= moved
            counts[agent, place] += moved
            sizes[donor] -= moved
            sizes[agent] += moved
    return counts
