"""Arguments and results of an algorithm's functions: contexts, batches, updates, costs.

Import them from :mod:`nufed.algorithms.protocol`, which documents their use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from nufed.meta.fine_tuning import Rate
from nufed.objective import AnyObjective, Batch

State: TypeAlias = Mapping[str, Tensor]
Places: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""Samples as indices into an agent's training part."""


@dataclass(frozen=True)
class Cost:
    """Numbers of gradient evaluations and Hessian-vector products."""

    gradients: int = 0
    hvps: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.gradients + other.gradients, self.hvps + other.hvps)


@dataclass(frozen=True)
class AgentUpdate:
    """What an agent sends to the server: the vectors named by ``Algorithm.sends``."""

    agent: int
    round: int
    samples: int
    vectors: State


@dataclass(frozen=True)
class AgentResult:
    """What ``agent_update`` returns: vectors to send, the agent's next state, the cost.

    The next state takes effect once the server has accepted the update; until then the old one is
    kept.
    """

    vectors: State
    state: State
    cost: Cost


@dataclass(frozen=True)
class Personal:
    """An agent's personal model: the flat vector ``"model"``, and further tensors if it has any.

    ``cost`` is that of computing it, in addition to training.
    """

    tensors: State
    cost: Cost = field(default_factory=Cost)

    @property
    def model(self) -> Tensor:
        return self.tensors["model"]


class Draw(NamedTuple):
    """The arguments of one call of :meth:`BatchSource.draw`."""

    purpose: str
    size: int
    number: int = 1
    step: int = 0


class BatchSource(Protocol):
    """One agent's training data in one round, as seeded batches."""

    @property
    def agent(self) -> int | Tensor:
        """The agent's number; for a stack of agents, a column of numbers."""
        ...

    def draw(self, purpose: str, size: int, number: int = 1, step: int = 0) -> list[Batch]:
        """``number`` independent batches of ``size`` samples, without replacement inside a batch.

        The same purpose and step give the same batches to every algorithm, and a larger ``number``
        only appends to them.
        """
        ...

    def epoch(self, purpose: str, size: int, index: int = 0, share: float = 1.0) -> list[Batch]:
        """All training samples, shuffled, as batches of ``size``; the last may be smaller.

        ``index`` numbers the epochs of a round. With a ``share`` below 1, a random subset of that
        share, rounded up. Not defined for a stack of agents.
        """
        ...

    def take(self, places: Places, seed: int | None = None) -> Batch:
        """Samples of the training part, by their places in it, as a batch with this seed.

        Not defined for a stack of agents.
        """
        ...

    def whole(self) -> Batch:
        """The agent's whole training part, in a fixed order. Not defined for a stack of agents."""
        ...

    def targets(self) -> Tensor:
        """The targets of the whole training part. Not defined for a stack of agents."""
        ...

    def stream(self, purpose: str, step: int = 0) -> np.random.Generator:
        """A random generator of this agent and round, for anything that is not a batch."""
        ...


@dataclass(frozen=True)
class Context:
    """What the server knows in a round besides vectors.

    Args:
        round: the number k of the round, from 1; 0 at evaluation.
        agents: N, how many agents take part in training.
        cohort: how many of them are picked in a round; 0 at evaluation.
        counted: of vectors that end in running statistics, how many numbers are parameters
            (``Algorithm.counted``).
    """

    round: int
    agents: int
    cohort: int
    counted: Mapping[str, int] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class AgentContext(Context):
    """What an agent knows in a round besides vectors.

    Args:
        objective: the loss on the agent's model.
        batches: the agent's training data, as seeded batches.
        samples: its number of training samples; for a stack of agents, a column of numbers.
    """

    objective: AnyObjective
    batches: BatchSource
    samples: int | Tensor

    @classmethod
    def of(
        cls, context: Context, objective: AnyObjective, batches: BatchSource, samples: int | Tensor
    ) -> AgentContext:
        """The server's context extended by what the agent knows."""
        return cls(context.round, context.agents, context.cohort, objective, batches, samples)

    @property
    def agent(self) -> int | Tensor:
        """The agent's number, as in :class:`AgentUpdate`; for a stack, a column of numbers."""
        return self.batches.agent

    def draw_each(self, draws: Iterable[Draw]) -> Iterator[Batch]:
        """The batches of these draws, one after another."""
        return (batch for draw in draws for batch in self.batches.draw(*draw))

    def epoch(self, batch_size: int) -> int:
        """The number of batches in an epoch; not defined for a stack of agents."""
        if isinstance(self.samples, Tensor):
            raise TypeError("agents of a stack have epochs of different lengths")
        return -(-self.samples // min(batch_size, self.samples))


@dataclass(frozen=True)
class Shipped:
    """The content of a bundle: a model, and the step size of its fine-tuning."""

    model: Tensor
    adapt_lr: Rate


@dataclass(frozen=True)
class TheorySettings:
    """The settings that enter the paper's bounds.

    ``kind`` names the local update; ``uniform`` says whether the server takes the uniform mean, as
    Theorem 1 assumes.
    """

    adapt_steps: int
    adapt_lr: float
    meta_lr: float
    local_steps: int
    batch_size: int
    kind: Literal["exact", "first_order", "hessian_free"]
    fd_step: float | Literal["auto"] = "auto"
    uniform: bool = True
