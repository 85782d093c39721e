"""The split of rows over agents, and of each agent's rows into training, validation and test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from nufed.data.partition import DirichletReusing, Rows
from nufed.data.samples import listed
from nufed.errors import InputError, shown
from nufed.registry import suggest
from nufed.seeding import stream

PARTS = ("train", "validation", "test")
T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    """The rows of every agent in three disjoint parts, and the agents held out from training.

    Agents are numbered from 0; ``names`` are for people. A split with a ``recipe`` draws an agent's
    rows lazily, and is saved as that recipe.
    """

    train: Sequence[Rows]
    validation: Sequence[Rows]
    test: Sequence[Rows]
    names: Sequence[str]
    unseen: tuple[int, ...] = ()
    recipe: DirichletReusing | None = None

    @property
    def agents(self) -> range:
        return range(len(self.names))

    @cached_property
    def seen(self) -> Sequence[int]:
        """The agents that take part in training."""
        return sorted(set(self.agents) - set(self.unseen)) if self.unseen else self.agents

    @cached_property
    def smallest_agent(self) -> int:
        """An agent with the fewest training rows."""
        return 0 if self.recipe else int(np.argmin([len(rows) for rows in self.train]))

    @cached_property
    def most_rows(self) -> int:
        """The maximum number of training rows of an agent."""
        return len(self.train[0]) if self.recipe else max(map(len, self.train))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything the split holds."""
        about, arrays = self.contents()
        digest = hashlib.sha256(json.dumps(about).encode())
        for name, array in sorted(arrays.items()):
            digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()

    def contents(self) -> tuple[dict[str, Any], dict[str, Rows]]:
        """All that it holds: names and agents held out (or the recipe), and arrays by name."""
        if self.recipe is not None:
            return {"recipe": self.recipe.describe(), "unseen": list(self.unseen)}, {}
        arrays = {}
        for part in PARTS:
            rows: list[Rows] = getattr(self, part)
            arrays[part] = np.concatenate(rows).astype(np.int64)
            arrays[part + "_sizes"] = np.array([len(r) for r in rows], dtype=np.int64)
        return {"names": list(self.names), "unseen": list(self.unseen)}, arrays

    def check(self, samples: int | None = None) -> None:
        """Refuse a split that leaks: over all agents, a row must be in parts of one kind only.

        Agents may share training rows, or test rows; no agent may have a row twice. Rows must lie
        in 0 … ``samples`` − 1.
        """
        agents = len(self.names)
        lengths = {len(part) for part in (self.train, self.validation, self.test)}
        if lengths != {agents} or not agents:
            raise InputError(f"it names {agents} agents and has parts for {sorted(lengths)} agents")
        different = len(set(self.unseen)) == len(self.unseen) < agents
        if not different or not all(agent in self.agents for agent in self.unseen):
            raise InputError(
                f"unseen = {shown(self.unseen)}: must be different agents of 0 … {agents - 1}, "
                "and one must be left to train"
            )
        if not len(self.train[self.smallest_agent]):
            name = self.names[self.smallest_agent]
            raise InputError(f"agent {shown(name)} has no training rows")
        if self.recipe is None:  # a recipe draws its parts from disjoint pools
            self._check_rows(samples)

    def _check_rows(self, samples: int | None) -> None:
        parts = [(kind, *entry) for kind in PARTS for entry in enumerate(getattr(self, kind))]
        rows = np.concatenate([part_rows for _, _, part_rows in parts])
        part = np.repeat(np.arange(len(parts)), [len(part_rows) for _, _, part_rows in parts])

        def where(place: int) -> str:
            kind, agent, _ = parts[part[place]]
            return f"the {kind} part of agent {shown(self.names[agent])}"

        last = rows.max() if samples is None else samples - 1
        outside = np.flatnonzero((rows < 0) | (rows > last))
        if len(outside):
            raise InputError(
                f"row {rows[outside[0]]} in {where(outside[0])} is outside of the data, rows 0 … "
                f"{last}; give the split of the same data"
            )
        kind, agent = np.divmod(part, len(self.names))
        order = np.lexsort((agent, kind, rows))
        first, second = order[:-1], order[1:]  # neighbours: occurrences of a row are adjacent
        same = rows[first] == rows[second]
        for twice, why in (
            (kind[first] != kind[second], "training and scored parts must be disjoint"),
            (agent[first] == agent[second], "an agent must not have a row twice"),
        ):
            shared = np.flatnonzero(same & twice)
            if len(shared):
                one, other = first[shared[0]], second[shared[0]]
                raise InputError(
                    f"row {rows[one]} is in {where(one)} and in {where(other)}, and {why}; make "
                    "the split again"
                )


def part_sizes(samples: int, validation: float, test: float, name: str = "") -> list[int]:
    """The numbers of an agent's samples for training, validation and test.

    Of n rows round(test·n) are for test and round(validation·n) for validation; the rest train.
    """
    tests, validations = round(test * samples), round(validation * samples)
    trains = samples - tests - validations
    if trains < 1 or (test > 0 and tests < 1) or (validation > 0 and validations < 1):
        raise InputError(
            f"agent {name} has {samples} samples, too few for a training part beside "
            f"validation = {validation} and test = {test}: give it more samples or change "
            "these fractions"
        )
    return [trains, validations, tests]


def make_split(
    rows: list[Rows],
    seed: int,
    *,
    validation: float,
    test: float,
    unseen_agents: int | Sequence[str] = 0,
    names: tuple[str, ...] | None = None,
    classes: Rows | None = None,
) -> Split:
    """Cut every agent's rows into disjoint parts, and pick the agents held out from training.

    ``unseen_agents`` is their number, or their names. With ``classes``, the class of every sample,
    each part gets its share of every class of an agent, up to rounding.
    """
    names = names or tuple(str(agent) for agent in range(len(rows)))
    parts = [
        _cut(
            agent_rows,
            agent,
            seed,
            part_sizes(len(agent_rows), validation, test, names[agent]),
            None if classes is None else classes[agent_rows],
        )
        for agent, agent_rows in enumerate(rows)
    ]
    unseen = choose_unseen(len(rows), unseen_agents, seed, names)
    rows_of = [[cut[part] for cut in parts] for part in range(len(PARTS))]
    return Split(rows_of[0], rows_of[1], rows_of[2], names, unseen)


def site_split(
    samples: int, agent: int, seed: int, *, validation: float, test: float, name: str
) -> Split:
    """One agent's samples 0 … ``samples`` − 1, cut as :func:`make_split` would cut them.

    It holds no other agents: accessing them is an error.
    """
    rows = np.arange(samples)
    parts = _cut(rows, agent, seed, part_sizes(samples, validation, test, name))

    def only(values: T) -> Sequence[T]:
        def item(asked: int) -> T:
            if asked != agent:
                raise InputError(f"agent {asked} is not at this site, which is agent {agent}")
            return values

        return _Lazy(agent + 1, item)

    return Split(only(parts[0]), only(parts[1]), only(parts[2]), only(name))


def _cut(
    rows: Rows, agent: int, seed: int, sizes: list[int], classes: Rows | None = None
) -> list[Rows]:
    """An agent's rows, shuffled, in parts of these sizes; stratified if ``classes`` are given."""
    order = stream(seed, "parts", agent=agent).permutation(len(rows))
    if classes is not None:
        order = order[np.argsort(_ranks(classes[order]), kind="stable")]
    return np.split(rows[order], np.cumsum(sizes)[:-1])


def _ranks(classes: Rows) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The relative rank of every sample within its class, between 0 and 1.

    >>> _ranks(np.array([3, 3, 5, 3, 5])).round(2).tolist()
    [0.17, 0.5, 0.25, 0.83, 0.75]
    """
    ranks = np.empty(len(classes))
    for each in np.unique(classes):
        places = np.flatnonzero(classes == each)
        ranks[places] = (np.arange(len(places)) + 0.5) / len(places)
    return ranks


def lazy_split(recipe: DirichletReusing, unseen: tuple[int, ...]) -> Split:
    """The split whose agents' rows are drawn lazily."""
    agents = len(recipe)

    def part(number: int) -> Sequence[Rows]:
        return _Lazy(agents, lambda agent: recipe[agent][number])

    return Split(part(0), part(1), part(2), _Lazy(agents, str), unseen, recipe)


def choose_unseen(
    agents: int, unseen_agents: int | Sequence[str], seed: int, names: Sequence[str] | None = None
) -> tuple[int, ...]:
    """The agents that are held out from training: so many, drawn from the seed, or those named.

    Without ``names`` agents are called by their numbers.

    >>> choose_unseen(3, ["bob"], 0, ["ann", "bob", "eve"]), choose_unseen(3, ["2", "0"], 0)
    ((1,), (0, 2))
    """
    if not isinstance(unseen_agents, int):
        return _unseen_by_name(unseen_agents, names or [str(agent) for agent in range(agents)])
    if not 0 <= unseen_agents < agents:
        raise InputError(
            f"unseen_agents = {unseen_agents}: of {agents} agents at least one must take part "
            f"in training, so it must lie in 0 … {agents - 1}"
        )
    unseen = stream(seed, "unseen").choice(agents, unseen_agents, replace=False)
    return tuple(sorted(unseen.tolist()))


def _unseen_by_name(unseen: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    numbers = {name: agent for agent, name in enumerate(names)}
    for name in unseen:
        if name not in numbers:
            raise InputError(
                f"= {shown(list(unseen))}: no agent is called {shown(name)}, the agents are "
                f"{listed(names)}{suggest(name, names)}",
                "data.unseen",
            )
    if len(set(unseen)) < len(unseen) or len(unseen) >= len(names):
        raise InputError(
            f"= {shown(list(unseen))}: must be different agents, and of {len(names)} at least one "
            "must be left to train",
            "data.unseen",
        )
    return tuple(sorted(numbers[name] for name in unseen))


class _Lazy(Sequence[T]):
    """A sequence whose items are computed on access."""

    def __init__(self, length: int, item: Callable[[int], T]) -> None:
        self._length, self._item = length, item

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self._item(i) for i in range(self._length)[place]]
        return self._item(range(self._length)[place])
