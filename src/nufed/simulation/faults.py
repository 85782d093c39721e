"""Simulated faults of a real federation: dropout, stragglers, corrupt updates.

They are drawn from separate random streams, so that the same agents fail for every method and no
other draw changes.

Corrupt agents send what an attack makes of their honest vectors. An attack is a function ``(vector,
before, rng)`` of the honest vector, the vector that the agent received, and a random stream. The
first line of its docstring describes it in ``nufed list``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nufed.algorithms.protocol import State
from nufed.data import Federation
from nufed.errors import InputError, require
from nufed.seeding import stream, torch_seed

Attack: TypeAlias = Callable[[Tensor, Tensor, np.random.Generator], Tensor]

FACTOR = 10.0  # norm of the change that scale and gaussian send / norm of the honest change


def sign_flip(vector: Tensor, before: Tensor, rng: np.random.Generator) -> Tensor:
    """the change of the model with its sign flipped"""
    return before - (vector - before)


def scale(vector: Tensor, before: Tensor, rng: np.random.Generator) -> Tensor:
    """ten times the change"""
    return before + FACTOR * (vector - before)


def gaussian(vector: Tensor, before: Tensor, rng: np.random.Generator) -> Tensor:
    """noise with ten times the norm of the change"""
    generator = torch.Generator().manual_seed(torch_seed(rng))
    noise = torch.randn(vector.shape, generator=generator, dtype=torch.float64)
    length = FACTOR * (vector - before).double().norm() / noise.norm()
    sent: Tensor = before + (noise * length).to(vector)
    return sent


def nan(vector: Tensor, before: Tensor, rng: np.random.Generator) -> Tensor:
    """non-finite numbers"""
    return torch.full_like(vector, float("nan"))


def labels(vector: Tensor, before: Tensor, rng: np.random.Generator) -> Tensor:
    """an honest update from training samples with wrong classes"""
    return vector  # the simulation changes the samples


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack for attack in (sign_flip, scale, gaussian, nan, labels)
}


class Fates(NamedTuple):
    """The agents of a cohort that drop out, and those that miss the deadline."""

    dropped: list[int]
    late: list[int]


@dataclass(frozen=True)
class Faults:
    """Rates of faults.

    Args:
        dropout: probability that an agent of a cohort does not reply.
        stragglers: probability that a reply misses the deadline, after the agent's work.
        corruption: fraction of agents whose updates are always corrupt.
        attack: how they are corrupted, one of :data:`nufed.simulation.faults.ATTACKS`.
    """

    dropout: float = 0.0
    stragglers: float = 0.0
    corruption: float = 0.0
    attack: str = "sign_flip"

    def __post_init__(self) -> None:
        for name in ("dropout", "stragglers", "corruption"):
            value = getattr(self, name)
            require(0 <= value < 1, name, value, "must be 0 or more and below 1")
        allowed = f"must be one of {', '.join(ATTACKS)}"
        require(self.attack in ATTACKS, "attack", self.attack, allowed)

    def corrupt_agents(self, agents: Sequence[int], seed: int) -> frozenset[int]:
        """The agents whose updates are always corrupt."""
        number = round(self.corruption * len(agents))
        picked = stream(seed, "corrupt agents").choice(len(agents), number, replace=False)
        return frozenset(agents[i] for i in picked)

    def fates(self, cohort: Sequence[int], seed: int, round: int, attempt: int = 0) -> Fates:
        """Draws the dropouts and stragglers of a cohort."""
        rng = stream(seed, "fates", round, step=attempt)
        drops, lates = rng.random(len(cohort)), rng.random(len(cohort))
        dropped = [a for a, x in zip(cohort, drops, strict=True) if x < self.dropout]
        late = [
            agent
            for agent, x in zip(cohort, lates, strict=True)
            if x < self.stragglers and agent not in dropped
        ]
        return Fates(dropped, late)

    def corrupted(
        self, vectors: State, before: Mapping[str, Tensor], seed: int, round: int, agent: int
    ) -> State:
        """What a corrupt agent sends instead of its vectors."""
        attack = ATTACKS[self.attack]
        return {
            name: attack(
                vector, before[name], stream(seed, "noise of corrupt agents", round, agent, place)
            )
            for place, (name, vector) in enumerate(sorted(vectors.items()))
        }

    def flip_labels(self, federation: Federation, seed: int) -> Federation:
        """The federation with flipped labels in the training parts of corrupt agents.

        Class c becomes C − 1 − c. Validation and test parts are unchanged. Agents must not share
        samples.
        """
        if self.attack != "labels" or not self.corruption:
            return federation
        samples, split = federation.samples, federation.split
        if not samples.classes or split.recipe is not None:
            raise InputError(
                'faults.attack = "labels": needs data with classes, and agents that share no '
                'samples; set data.reuse = "never", or use another attack'
            )
        corrupt = self.corrupt_agents(split.seen, seed)
        targets = samples.targets.clone()
        rows = [split.train[agent] for agent in sorted(corrupt)]
        if rows:
            wrong = torch.from_numpy(np.concatenate(rows))
            targets[wrong] = len(samples.classes) - 1 - targets[wrong]
        return replace(federation, samples=replace(samples, targets=targets))
