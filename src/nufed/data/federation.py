"""Samples with their split over agents: what engines train and evaluate on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nufed.algorithms.local_training import smallest_batch
from nufed.algorithms.protocol import HALVES, Algorithm, Draw, Pool
from nufed.data.augmentation import Augmentation, augmented
from nufed.data.partition import Rows
from nufed.data.samples import CPU, Samples, as_index
from nufed.data.split import Split
from nufed.errors import InputError, in_short
from nufed.objective import Batch, Inputs, Objective
from nufed.seeding import stream, torch_seed

SmallAgents: TypeAlias = Literal["refuse", "use_all"]
ScoredOn: TypeAlias = Literal["test", "validation"]


@dataclass(frozen=True)
class Federation:
    """Samples, a split, and what to do with agents that have fewer samples than a batch.

    ``small_agents="refuse"`` raises an error that names the agent; with ``"use_all"`` such an agent
    uses all its training samples as its batch. ``scored_on`` names the part that evaluation reads:
    the test part for reporting, the validation part for making choices. ``augment`` changes the
    inputs of training batches (:mod:`nufed.data.augmentation`). Batches and scored samples are on
    ``device``, where all samples are copied once.
    """

    samples: Samples
    split: Split
    small_agents: SmallAgents = "refuse"
    scored_on: ScoredOn = "test"
    augment: Augmentation | None = None
    device: torch.device = CPU

    def __post_init__(self) -> None:
        if self.samples.columns:
            raise InputError(
                "the samples are raw columns of a table: learn a preparation from training rows "
                "and apply it first (nufed.data.learn_preparation, nufed.data.prepare)"
            )

    def batches(self, agent: int, seed: int, use: str, round: int = 0) -> AgentBatches:
        """The training part of an agent as seeded batches; ``use`` names the streams."""
        return AgentBatches(self, agent, seed, use, round)

    def scored(self, agent: int) -> tuple[Inputs, Tensor]:
        """The samples that an agent is scored on. For evaluation only."""
        return self.take(self.scored_rows(agent))

    def take(self, rows: Rows | Tensor) -> tuple[Inputs, Tensor]:
        """The inputs and targets of these rows."""
        return self.samples.take(rows, self.device)

    def scored_rows(self, agent: int) -> Rows:
        """The rows that an agent is scored on."""
        parts = self.split.test if self.scored_on == "test" else self.split.validation
        return parts[agent]

    def scoring(self, part: ScoredOn) -> Federation:
        """A copy that scores agents on ``part``."""
        return self if part == self.scored_on else replace(self, scored_on=part)

    def on(self, device: torch.device) -> Federation:
        """A copy that places batches and scored samples on a device."""
        return self if device == self.device else replace(self, device=device)

    def scorable(self, agents: Iterable[int]) -> list[int]:
        """The agents among these that have samples in the scored part."""
        return [agent for agent in agents if len(self.scored_rows(agent))]

    def check_batch_size(self, size: int) -> None:
        """Refuse a batch size that some agent has too few samples for."""
        self.batch_rows(self.split.smallest_agent, size)

    def check_halves(self, agent: int) -> None:
        """Refuse an agent whose training part can't be halved."""
        if len(self.split.train[agent]) < 2:
            raise InputError(
                f"agent {self.split.names[agent]} has a single training sample, which can't be "
                'both an inner and an outer one: set outer_samples = "independent", or give '
                "agents more samples"
            )

    def batch_rows(self, agent: int, size: int) -> tuple[Rows, int]:
        """An agent's training rows, and its batch size."""
        rows = self.split.train[agent]
        if size > len(rows) and self.small_agents == "refuse":
            raise InputError(
                f"agent {self.split.names[agent]} has {len(rows)} training samples and batch_size "
                f"is {size}: lower batch_size, give agents more samples, or set "
                'data.small_agents = "use_all" to let such agents use all their samples as a batch'
            )
        return rows, min(size, len(rows))


def check_single_sample(
    federation: Federation, agent: int, name: str, algorithm: Algorithm, objective: Objective
) -> bool:
    """Refuse a batch of one sample, which epochs may end with, if the model can't train on one.

    BatchNorm can't, where a sample gives one value per channel; this is tried on the model. Returns
    whether it was tried and works; False if the agent has no such batch.
    """
    rows = federation.split.train[agent]
    if smallest_batch(algorithm, len(rows)) > 1:
        return False
    error = _single_sample_error(objective, federation.samples, rows[0])
    if error is None:
        return True
    raise InputError(
        f"agent {federation.split.names[agent]} has {len(rows)} training samples and the "
        f"batch_size of {name} is {algorithm.batch_size}: its last batch has one sample, on which "
        f"this model can't be trained ({error}); choose another batch_size, local_steps instead of "
        'local_epochs, model.running_stats = "frozen", or GroupNorm'
    )


def _single_sample_error(objective: Objective, samples: Samples, row: int) -> str | None:
    """Why the model can be trained on two samples but not on one; None if it can, or on neither."""
    w, error = objective.initial(), None
    for rows in ([row], [row, row]):
        try:
            objective.grad(w, Batch(*samples.take(np.array(rows)), seed=0))
        except Exception as caught:  # the user's model or loss may raise anything
            if error is not None:
                return None
            error = in_short(caught.__cause__ or caught)
        else:
            return error
    return None


class Picked(NamedTuple):
    """A batch as indices, and the seed of its dropout masks.

    ``places`` are indices into the agent's training part, ``rows`` those into all samples, and
    ``there`` the same on the federation's device, if that is not the CPU.
    """

    places: Rows
    rows: Rows
    seed: int
    there: Tensor | None = None

    @property
    def taken(self) -> Rows | Tensor:
        """The rows in the form that :meth:`Federation.take` is fastest with."""
        return self.rows if self.there is None else self.there


@dataclass(frozen=True)
class AgentBatches:
    """One agent's training data in one round (a :class:`nufed.algorithms.protocol.BatchSource`).

    ``ready`` has the results of :meth:`pick` that :meth:`ahead` has computed, by its arguments.
    """

    federation: Federation
    agent: int
    seed: int
    use: str
    round: int
    ready: Mapping[Draw, list[Picked]] = field(default_factory=dict)

    def ahead(self, draws: Iterable[Draw]) -> AgentBatches:
        """A copy that has already drawn these: faster than one by one between products."""
        draws = list(draws)
        every = [self.pick(*draw) for draw in draws]
        placed = iter(self._placed([pick for picks in every for pick in picks]))
        ready = {draw: list(islice(placed, len(p))) for draw, p in zip(draws, every, strict=True)}
        return replace(self, ready=ready)

    def draw(
        self, purpose: str, size: int, number: int = 1, step: int = 0, pool: Pool = "all"
    ) -> list[Batch]:
        """Independent batches, each with a dropout seed."""
        picks = self._placed(self.pick(purpose, size, number, step, pool))
        return [self._batch(pick.taken, pick.seed) for pick in picks]

    def epoch(self, purpose: str, size: int, index: int = 0, share: float = 1.0) -> list[Batch]:
        """All samples, or a share, in a random order, as batches of ``size`` with dropout seeds."""
        rows, size = self.federation.batch_rows(self.agent, size)
        rng = stream(self.seed, f"{self.use}/{purpose}/epoch", self.round, self.agent, index)
        order = rng.permutation(rows)
        there = as_index(order[: math.ceil(share * len(order))], self.federation.device)
        return [self._batch(piece, torch_seed(rng)) for piece in torch.split(there, size)]

    def take(self, places: Rows, seed: int | None = None) -> Batch:
        """Samples of the training part, by their places in it, as a batch with this seed."""
        rows = self.federation.split.train[self.agent][places]
        return self._batch(rows, seed)

    def whole(self) -> Batch:
        """The whole training part, without a dropout seed."""
        return Batch(*self.federation.take(self.federation.split.train[self.agent]))

    def targets(self) -> Tensor:
        """The targets of the whole training part."""
        return self.federation.samples.targets[self.federation.split.train[self.agent]]

    def stream(self, purpose: str, step: int = 0) -> np.random.Generator:
        """A random generator for this agent and round, for draws other than batches."""
        return stream(self.seed, f"{self.use}/{purpose}/stream", self.round, self.agent, step)

    @property
    def augment(self) -> Augmentation | None:
        """The augmentation of these batches; None: none, as outside of training."""
        return self.federation.augment if self.use == "train" else None

    def _batch(self, rows: Rows | Tensor, seed: int | None) -> Batch:
        """These samples as a batch, in training with changed inputs if it has a seed."""
        inputs, targets = self.federation.take(rows)
        if self.augment is not None and seed is not None:
            inputs = augmented(self.augment, inputs, seed)
        return Batch(inputs, targets, seed)

    @property
    def samples(self) -> int:
        """The agent's number of training samples."""
        return len(self.federation.split.train[self.agent])

    def pick(
        self, purpose: str, size: int, number: int = 1, step: int = 0, pool: Pool = "all"
    ) -> list[Picked]:
        """The batches of :meth:`draw` as indices."""
        if number == 0:
            return []
        if (batches := self.ready.get(Draw(purpose, size, number, step, pool))) is not None:
            return batches
        rows, size = self.federation.batch_rows(self.agent, size)
        among: int | Rows = len(rows)
        if pool in HALVES:
            among = self._half(pool, step)
            size = min(size, len(among))
        rng = stream(self.seed, f"{self.use}/{purpose}", self.round, self.agent, step)
        picked = []
        for _ in range(number):
            places = rng.choice(among, size, replace=pool == "resampled")
            picked.append(Picked(places, rows[places], torch_seed(rng)))
        return picked

    def _half(self, pool: Pool, step: int) -> Rows:
        """One of two random halves of the training part, as places; they are equally large."""
        self.federation.check_halves(self.agent)
        rng = stream(self.seed, f"{self.use}/halves", self.round, self.agent, step)
        half = self.samples // 2
        first: Rows = rng.permutation(self.samples)[HALVES.index(pool) * half :]
        return first[:half]

    def _placed(self, picks: list[Picked]) -> list[Picked]:
        """The picks with their indices on the federation's device, moved together."""
        device = self.federation.device
        if device.type == "cpu" or not picks or picks[0].there is not None:
            return picks
        index = as_index(np.concatenate([pick.rows for pick in picks]), device)
        parts = torch.split(index, [len(pick.rows) for pick in picks])
        return [pick._replace(there=there) for pick, there in zip(picks, parts, strict=True)]
