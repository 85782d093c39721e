"""Partitions of samples over agents, by name, with the signature that a user's own has.

Each returns one array of row numbers per agent, and none gives a row twice to one agent. Those with
agents of unequal size (per-class Dirichlet, quantity skew) use every sample once: they redraw a
bounded number of times until every agent has the minimum size, then move samples from the largest
agents to those that still lack some, so that they always terminate.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from nufed.data.samples import Samples
from nufed.errors import InputError, require, require_whole, shown
from nufed.registry import Registry
from nufed.seeding import stream

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def shuffled_classes(labels: Rows, classes: Rows, rng: np.random.Generator) -> list[Rows]:
    """The rows of every class, each in random order."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in classes]


def check_enough(have: int, needed: int, agents: int, samples_per_agent: int) -> None:
    """Refuse a partition that needs more samples than there are."""
    if needed > have:
        raise InputError(
            f"{agents} agents with {samples_per_agent} samples each need {needed} samples and the "
            f"data has {have}: ask for fewer agents or samples_per_agent, or with the dirichlet "
            'partition let agents share samples, data.reuse = "across_agents"'
        )


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
    labels_of_subset = labels[subset]
    pools = shuffled_classes(labels_of_subset, np.unique(labels_of_subset), rng)
    cap = len(labels_of_subset) / agents if self_balancing else np.inf

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
    require_whole(min_size=min_size)
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


Partition: TypeAlias = Callable[..., Any]
"""Called with (samples, agents, samples_per_agent, rng) and settings as keywords; returns one array
of row numbers per agent, or a mapping from agents' names to such arrays."""


def _by_class(function: Callable[..., list[Rows]]) -> Partition:
    """A function of the samples' classes as a partition."""

    @wraps(function)
    def partition(
        samples: Samples, agents: int, size: int | None, rng: np.random.Generator, **settings: Any
    ) -> list[Rows]:
        if not samples.classes:
            raise InputError(
                f"= {function.__name__!r}: this data has no classes; use 'iid', 'quantity_skew', "
                "or 'given' with owners",
                "data.partition",
            )
        labels = samples.targets.numpy()
        return function(labels, agents, samples_per_agent=size, rng=rng, **settings)

    return partition


def _by_number(function: Callable[..., list[Rows]]) -> Partition:
    """A function of the number of samples as a partition."""

    @wraps(function)
    def partition(
        samples: Samples, agents: int, size: int | None, rng: np.random.Generator, **settings: Any
    ) -> list[Rows]:
        return function(len(samples), agents, samples_per_agent=size, rng=rng, **settings)

    return partition


@wraps(given)
def _by_owner(
    samples: Samples, agents: int, size: int | None, rng: np.random.Generator
) -> dict[str, Rows]:
    if samples.owners is None:
        raise InputError(
            "= 'given': this data has no owners of its samples; give owners with the data, or use "
            "another partition",
            "data.partition",
        )
    rows, names = given(samples.owners)
    return dict(zip(names, rows, strict=True))


def _refuse(candidate: object) -> str | None:
    return None if callable(candidate) else "is not a function"


PARTITIONS: Registry[Partition] = Registry(
    {
        "dirichlet": _by_class(dirichlet),
        "dirichlet_by_class": _by_class(dirichlet_by_class),
        "quantity_skew": _by_number(quantity_skew),
        "iid": _by_number(iid),
        "shards": _by_class(shards),
        "given": _by_owner,
    },
    "nufed.partitions",
    "function",
    _refuse,
)


def settings_taken(partition: Partition, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are arguments of a partition."""
    arguments = inspect.signature(partition).parameters
    return {name: value for name, value in settings.items() if name in arguments}


def check_arguments(name: str, partition: Partition, arguments: Mapping[str, Any]) -> None:
    """Refuse ``data.partition_args`` that a partition has no argument for."""
    parameters = inspect.signature(partition).parameters
    if (
        any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        or arguments.keys() <= parameters.keys()
    ):
        return
    settable = [
        n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY or p.default is not p.empty
    ]
    raise InputError(
        f"= {shown(dict(arguments))}: the partition {name!r} takes "
        f"{', '.join(settable) or 'none'}; remove or rename what it does not take",
        "data.partition_args",
    )


def check_dealt(dealt: Any, samples: int, agents: int) -> tuple[list[Rows], tuple[str, ...] | None]:
    """Check what a partition returned: the rows of every agent, and the agents' names if given.

    A mapping from names decides on the number of agents itself.
    """
    names = None
    if isinstance(dealt, Mapping) and dealt:
        names, dealt = tuple(map(str, dealt)), list(dealt.values())
        agents = len(names)
    try:
        rows = [np.asarray(agent_rows) for agent_rows in dealt]
    except (TypeError, ValueError):
        rows = []
    if len(rows) != agents:
        raise InputError(
            f"the partition returned {len(rows)} arrays of row numbers: it must return one for "
            f"each of {agents} agents"
        )
    for agent, agent_rows in enumerate(rows):
        whole = agent_rows.ndim == 1 and np.issubdtype(agent_rows.dtype, np.integer)
        inside = whole and bool(((agent_rows >= 0) & (agent_rows < samples)).all())
        if not inside or len(np.unique(agent_rows)) < len(agent_rows):
            raise InputError(
                f"the partition gave agent {agent} rows that are not distinct numbers in "
                f"0 … {samples - 1}"
            )
    return [agent_rows.astype(np.int64) for agent_rows in rows], names
