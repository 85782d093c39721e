"""Partitions of samples over agents. Each returns one array of row numbers per agent.

No function here gives a row twice to one agent, and all of them terminate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from nufed.data.rows import Rows as Rows
from nufed.data.rows import check_enough, shuffled_classes
from nufed.errors import InputError
from nufed.seeding import stream

Reuse: TypeAlias = Literal["never", "across_agents"]


def dirichlet(
    labels: Rows,
    agents: int,
    samples_per_agent: int | None,
    concentration: float,
    rng: np.random.Generator,
) -> list[Rows]:
    """The paper's split: each agent draws a class distribution, then samples by it.

    The distribution of each agent comes from a symmetric Dirichlet with parameter
    ``concentration`` (α_d): near 0 an agent holds one class, towards infinity all are alike. No two
    agents share a sample. An exhausted class is dropped and the agent's distribution renormalised
    over the remaining ones, so that later agents may get classes outside their distribution; where
    the remaining classes have probability 0, they are drawn by their remaining counts. Without a
    size, agents get an equal number of all samples.

    >>> labels = np.array([0] * 5 + [1] * 5)
    >>> [len(rows) for rows in dirichlet(labels, 2, 5, 0.1, np.random.default_rng(0))]
    [5, 5]
    """
    samples_per_agent = samples_per_agent or max(1, len(labels) // agents)
    check_enough(len(labels), samples_per_agent * agents, agents, samples_per_agent)
    pools = shuffled_classes(labels, np.unique(labels), rng)
    sizes = np.array([len(pool) for pool in pools])
    taken = np.zeros_like(sizes)
    parts = []
    for _ in range(agents):
        pmf = rng.dirichlet(np.full(len(pools), concentration))
        counts = _draw_counts(pmf, sizes - taken, samples_per_agent, rng)
        rows = [p[t : t + n] for p, t, n in zip(pools, taken, counts, strict=True)]
        taken += counts
        parts.append(np.concatenate(rows))
    return parts


class DirichletReusing(Sequence[list[Rows]]):
    """The same, but agents may share samples: every agent draws from the whole data.

    The data is cut once into as many pools as there are ``sizes`` (training, validation, test),
    stratified by class and in proportion to the sizes; an agent draws each part from its pool, all
    by one class distribution. So no agent trains on what another one is tested on; but agents,
    including unseen ones, share training rows (docs/data.md). A sequence with a list of parts per
    agent; no part holds a row twice.

    An agent's parts are a function of the seed and its number and are drawn lazily: a million
    agents take no memory.
    """

    def __init__(
        self, labels: Rows, agents: int, sizes: Sequence[int], concentration: float, seed: int
    ) -> None:
        self._agents, self._sizes = agents, tuple(sizes)
        self._concentration, self._seed = concentration, seed
        self._labels_sha256 = hashlib.sha256(np.ascontiguousarray(labels).tobytes()).hexdigest()
        cuts = np.cumsum(sizes)[:-1] / sum(sizes)
        shuffled = shuffled_classes(labels, np.unique(labels), stream(seed, "partition"))
        by_class = [np.split(p, np.round(cuts * len(p)).astype(int)) for p in shuffled]
        self._pools = [[pieces[part] for pieces in by_class] for part in range(len(sizes))]
        for pool, size in zip(self._pools, sizes, strict=True):
            check_enough(sum(map(len, pool)), size, 1, size)
        self._parts = lru_cache(maxsize=256)(self._draw)

    def describe(self) -> dict[str, Any]:
        """Its arguments, with the SHA-256 of the labels."""
        return {
            "agents": self._agents,
            "sizes": list(self._sizes),
            "concentration": self._concentration,
            "seed": self._seed,
            "labels_sha256": self._labels_sha256,
        }

    def __len__(self) -> int:
        return self._agents

    @overload
    def __getitem__(self, agent: int) -> list[Rows]: ...

    @overload
    def __getitem__(self, agent: slice) -> Sequence[list[Rows]]: ...

    def __getitem__(self, agent: int | slice) -> Any:
        if isinstance(agent, slice):
            return [self[i] for i in range(self._agents)[agent]]
        return self._parts(range(self._agents)[agent])

    def _draw(self, agent: int) -> list[Rows]:
        rng = stream(self._seed, "partition of", agent=agent)
        pmf = rng.dirichlet(np.full(len(self._pools[0]), self._concentration))
        return [
            _draw_part(pool, pmf, size, rng)
            for pool, size in zip(self._pools, self._sizes, strict=True)
        ]


def _draw_part(
    pool: list[Rows], pmf: np.ndarray[Any, Any], size: int, rng: np.random.Generator
) -> Rows:
    """``size`` rows of a pool, its classes by ``pmf``."""
    counts = _draw_counts(pmf, np.array([len(rows) for rows in pool]), size, rng)
    drawn = [rng.choice(rows, n, replace=False) for rows, n in zip(pool, counts, strict=True)]
    return np.concatenate(drawn).astype(np.int64)


def _draw_counts(
    pmf: np.ndarray[Any, Any], available: Rows, total: int, rng: np.random.Generator
) -> Rows:
    """The number of samples of each class in ``total`` draws by ``pmf``, within ``available``.

    The same distribution as drawing one by one and renormalising whenever a class is exhausted.
    Each iteration either finishes or exhausts a class.
    """
    counts = np.zeros_like(available)
    while (missing := total - counts.sum()) > 0:
        left = available - counts
        weights = np.where(left > 0, pmf, 0.0)
        if weights.sum() < np.finfo(float).tiny:
            weights = left.astype(float)
        drawn = rng.multinomial(missing, weights / weights.sum())
        counts += np.minimum(drawn, left)
    return counts


def iid(
    samples: int, agents: int, samples_per_agent: int | None, rng: np.random.Generator
) -> list[Rows]:
    """Every agent gets a random part of the data; without a size, all of it is split evenly."""
    rows = rng.permutation(samples)
    if samples_per_agent is None:
        check_enough(samples, agents, agents, 1)
        return np.array_split(rows, agents)
    needed = agents * samples_per_agent
    check_enough(samples, needed, agents, samples_per_agent)
    return np.split(rows[:needed], agents)


def shards(
    labels: Rows,
    agents: int,
    classes_per_agent: int,
    samples_per_agent: int | None,
    rng: np.random.Generator,
) -> list[Rows]:
    """Every agent holds samples of exactly ``classes_per_agent`` classes.

    Classes are assigned as evenly as possible, and each class's samples split evenly among its
    agents. With a size, each agent keeps that many, spread evenly over its classes.
    """
    pools = shuffled_classes(labels, np.unique(labels), rng)
    if not 1 <= classes_per_agent <= len(pools):
        raise InputError(
            f"classes_per_agent = {classes_per_agent}: must lie in 1 … {len(pools)}, the number of "
            "classes that have samples"
        )
    uses = np.zeros(len(pools), dtype=np.int64)
    held: list[list[int]] = []
    for _ in range(agents):
        least_used = np.lexsort((rng.random(len(pools)), uses))[:classes_per_agent]
        uses[least_used] += 1
        held.append(least_used.tolist())
    dealt = [iter(np.array_split(p, max(int(u), 1))) for p, u in zip(pools, uses, strict=True)]
    parts = []
    for agent, classes in enumerate(held):
        pieces = [next(dealt[c]) for c in classes]
        wanted = [len(piece) for piece in pieces]
        if samples_per_agent is not None:
            share, extra = divmod(samples_per_agent, classes_per_agent)
            wanted = [share + (i < extra) for i in range(classes_per_agent)]
        if any(n < 1 or n > len(piece) for n, piece in zip(wanted, pieces, strict=True)):
            raise InputError(
                f"agent {agent} would get {[len(p) for p in pieces]} samples of its classes where "
                f"{wanted} are needed: ask for fewer agents, fewer samples_per_agent or more "
                "classes_per_agent"
            )
        parts.append(np.concatenate([p[:n] for p, n in zip(pieces, wanted, strict=True)]))
    return parts


def given(owners: np.ndarray[Any, Any]) -> tuple[list[Rows], tuple[str, ...]]:
    """One agent per owner (a natural federation), with the owners' names.

    >>> given(np.array(["ann", "bob", "ann"]))
    ([array([0, 2]), array([1])], ('ann', 'bob'))
    """
    names, index = np.unique(owners, return_inverse=True)
    order = np.argsort(index, kind="stable")
    ends = np.cumsum(np.bincount(index))[:-1]
    return np.split(order, ends), tuple(str(name) for name in names)
