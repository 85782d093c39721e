"""What a federated algorithm is: a small frozen object of pure functions, and its records.

An engine (the simulator, Flower) runs any :class:`Algorithm` the same way::

    server = algorithm.server_init(objective, w)
    for every round:
        for every agent of the cohort:                          # at the agent
            result = algorithm.client_update(objective, received, client_state, batches)
        server = algorithm.server_update(server, updates)       # at the server

State, at the server and at an agent, is a mapping from names to vectors and holds only what the
next round needs, so that it can be checked, hashed, stored and sent without knowing the algorithm.
The server's ``"model"`` is the meta-model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from nufed.objective import AnyObjective, Batch

State: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class Cost:
    """Work done: gradient evaluations and Hessian-vector products."""

    gradients: int = 0
    hvps: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.gradients + other.gradients, self.hvps + other.hvps)


@dataclass(frozen=True)
class ClientUpdate:
    """What an agent sends to the server: the vectors named by ``Algorithm.sends``."""

    agent: int
    round: int
    samples: int
    vectors: State


@dataclass(frozen=True)
class ClientResult:
    """What ``client_update`` returns: vectors to send, the agent's next state, and diagnostics."""

    vectors: State
    state: State
    cost: Cost


class Draw(NamedTuple):
    """The arguments of one call of :meth:`BatchSource.draw`."""

    purpose: str
    size: int
    number: int = 1
    step: int = 0


class BatchSource(Protocol):
    """One agent's training data in one round, as seeded batches."""

    def draw(self, purpose: str, size: int, count: int = 1, step: int = 0) -> list[Batch]:
        """``count`` independent batches of ``size`` samples, without replacement inside a batch.

        The same purpose and step always give the same batches, and a longer list starts with the
        shorter one, whatever the algorithm.
        """
        ...


class Algorithm(Protocol):
    """A federated algorithm."""

    @property
    def batch_size(self) -> int:
        """Samples per batch, at most what every agent has for training."""
        ...

    @property
    def receives(self) -> tuple[str, ...]:
        """The server's vectors that go to an agent."""
        ...

    @property
    def sends(self) -> tuple[str, ...]:
        """The vectors that come back, each shaped like the server's vector of that name."""
        ...

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        """The server's state before the first round, from an initial model."""
        ...

    def client_init(self, w: Tensor) -> State:
        """An agent's state before its first round; empty if it keeps nothing."""
        ...

    def client_update(
        self, objective: AnyObjective, received: State, state: State, batches: BatchSource
    ) -> ClientResult:
        """One agent's work in one round."""
        ...

    def server_update(self, server: State, updates: Sequence[ClientUpdate]) -> State:
        """The server's state after a round, from checked updates in the order of agents."""
        ...

    def personalize(
        self,
        objective: AnyObjective,
        server: State,
        state: State,
        batches: BatchSource,
        steps: int,
        scale: float = 1.0,
    ) -> Iterator[Tensor]:
        """What an agent does before it is evaluated or served: its models after 0 … ``steps``.

        ``scale`` multiplies the step size of fine-tuning: the best one at use need not be the one
        that the model was trained with.
        """
        ...


@runtime_checkable
class Combining(Protocol):
    """What an algorithm may add, so that engines may run many agents at once.

    ``combines`` says how ``client_update`` and ``personalize`` make vectors of vectors:

    * ``"elementwise"``: number by number, so that they may be handed a stack, one row per agent;
    * ``"linearly"``: also only by sums and plain multiples of gradients and of what they received,
      so that vectors may stand in other coordinates (:mod:`nufed.gram`).
    """

    @property
    def combines(self) -> Literal["elementwise", "linearly"]: ...

    def update_draws(self) -> Sequence[Draw]:
        """Every draw of ``client_update``, so that an engine can prepare for them."""
        ...

    def personal_draws(self, steps: int) -> Sequence[Draw]:
        """Every draw of ``personalize``."""
        ...
