"""The partitions by name, with the signature that a user's own has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeAlias

import numpy as np

from nufed.data.partition import dirichlet, given, iid, shards
from nufed.data.rows import Rows
from nufed.data.samples import Samples
from nufed.data.uneven import dirichlet_by_class, quantity_skew
from nufed.errors import InputError, shown
from nufed.registry import Registry

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
                f"data.partition = {function.__name__!r}: this data has no classes; use 'iid', "
                "'quantity_skew', or 'given' with owners"
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
            "data.partition = 'given': this data has no owners of its samples; give owners with "
            "the data, or use another partition"
        )
    rows, names = given(samples.owners)
    return dict(zip(names, rows, strict=True))


def _refuse(found: object) -> str | None:
    return None if callable(found) else "is not a function"


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
    """Those settings that a partition has an argument for."""
    arguments = inspect.signature(partition).parameters
    return {name: value for name, value in settings.items() if name in arguments}


def check_arguments(name: str, partition: Partition, arguments: Mapping[str, Any]) -> None:
    """Refuse ``data.partition_args`` that a partition has no argument for."""
    found = inspect.signature(partition).parameters
    if any(p.kind is p.VAR_KEYWORD for p in found.values()) or arguments.keys() <= found.keys():
        return
    own = [n for n, p in found.items() if p.kind is p.KEYWORD_ONLY or p.default is not p.empty]
    raise InputError(
        f"data.partition_args = {shown(dict(arguments))}: the partition {name!r} takes "
        f"{', '.join(own) or 'none'}; remove or rename what it does not take"
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
        rows = [np.asarray(own) for own in dealt]
    except (TypeError, ValueError):
        rows = []
    if len(rows) != agents:
        raise InputError(
            f"the partition returned {len(rows)} arrays of row numbers: it must return one for "
            f"each of {agents} agents"
        )
    for agent, own in enumerate(rows):
        whole = own.ndim == 1 and np.issubdtype(own.dtype, np.integer)
        inside = whole and bool(((own >= 0) & (own < samples)).all())
        if not inside or len(np.unique(own)) < len(own):
            raise InputError(
                f"the partition gave agent {agent} rows that are not distinct numbers in "
                f"0 … {samples - 1}"
            )
    return [own.astype(np.int64) for own in rows], names
