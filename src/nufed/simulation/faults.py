"""What goes wrong with agents of a real federation, for a simulation: who, when, and how.

All of it is drawn from streams of its own, so that the same agents fail for every method, and
nothing else is drawn differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from nufed.algorithm import State
from nufed.data import Federation
from nufed.errors import InputError, require
from nufed.seeding import stream, torch_seed

Attack: TypeAlias = Literal["sign_flip", "scale", "gaussian", "nan", "labels"]
ATTACKS: tuple[str, ...] = get_args(Attack)
TIMES = 10.0  # how much longer a scaled change is, and Gaussian noise than the change


class Fates(NamedTuple):
    """Who of a cohort does not answer, and who answers too late."""

    dropped: list[int]
    late: list[int]


@dataclass(frozen=True)
class Faults:
    """Rates of faults.

    Args:
        dropout: the probability that an agent of a cohort does not answer.
        stragglers: the probability that one that answers does so too late, after its work.
        corruption: the share of agents that always send something else.
        attack: what they send. ``sign_flip``: the change of the model with the other sign;
            ``scale``: ten times the change; ``gaussian``: noise ten times as long as the change;
            ``nan``; ``labels``: an honest update from training samples with wrong classes.
    """

    dropout: float = 0.0
    stragglers: float = 0.0
    corruption: float = 0.0
    attack: Attack = "sign_flip"

    def __post_init__(self) -> None:
        for name in ("dropout", "stragglers", "corruption"):
            value = getattr(self, name)
            require(0 <= value < 1, name, value, "must be 0 or more and below 1")
        allowed = f"must be one of {', '.join(ATTACKS)}"
        require(self.attack in ATTACKS, "attack", self.attack, allowed)

    def corrupt_agents(self, agents: Sequence[int], seed: int) -> frozenset[int]:
        """The agents that never send what they should."""
        number = round(self.corruption * len(agents))
        picked = stream(seed, "corrupt agents").choice(len(agents), number, replace=False)
        return frozenset(agents[i] for i in picked)

    def fates(self, cohort: Sequence[int], seed: int, round: int, attempt: int = 0) -> Fates:
        """What happens to the agents of a cohort."""
        rng = stream(seed, "fates", round, step=attempt)
        drops, lates = rng.random(len(cohort)), rng.random(len(cohort))
        dropped = [a for a, x in zip(cohort, drops, strict=True) if x < self.dropout]
        late = [
            agent
            for agent, x in zip(cohort, lates, strict=True)
            if x < self.stragglers and agent not in dropped
        ]
        return Fates(dropped, late)

    def instead_of(
        self, vectors: State, before: Mapping[str, Tensor], seed: int, round: int, agent: int
    ) -> State:
        """What a corrupt agent sends in the place of its vectors."""
        if self.attack == "labels":
            return vectors
        sent = {}
        for place, (name, vector) in enumerate(sorted(vectors.items())):
            change = vector - before[name]
            if self.attack == "sign_flip":
                sent[name] = before[name] - change
            elif self.attack == "scale":
                sent[name] = before[name] + TIMES * change
            elif self.attack == "nan":
                sent[name] = torch.full_like(vector, float("nan"))
            else:
                drawn = stream(seed, "noise of corrupt agents", round, agent, place)
                generator = torch.Generator().manual_seed(torch_seed(drawn))
                noise = torch.randn(vector.shape, generator=generator, dtype=torch.float64)
                length = TIMES * change.double().norm() / noise.norm()
                sent[name] = before[name] + (noise * length).to(vector)
        return sent

    def spoil(self, federation: Federation, seed: int) -> Federation:
        """The federation with wrong classes in the training parts of corrupt agents.

        Class c becomes C − 1 − c. Test parts stay right. Samples must belong to one agent each.
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
