"""Row numbers of samples, and what partitions share."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from nufed.errors import InputError

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
