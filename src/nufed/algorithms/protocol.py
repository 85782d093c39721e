"""What a federated algorithm is: a frozen dataclass of pure functions.

Engines (the simulation, Flower) run any :class:`Algorithm` the same way::

    server = algorithm.server_init(objective, w)
    for every round:
        for every agent of the cohort:                              # at the agent
            result = algorithm.agent_update(context, received, state)
        server = algorithm.server_update(context, server, updates)  # at the server
    for every agent that is evaluated:                              # at the agent
        personal = algorithm.personal_model(context, received, state)
        models = algorithm.fine_tune(context, received, personal, steps)

A state, at the server and at an agent, is a mapping from names to tensors and holds only what the
next round needs, so that it can be checked, hashed, stored and sent without knowing the algorithm.
``received`` holds the server's vectors named by ``Algorithm.receives``, and nothing else. The types
of arguments and results come first.

Updates of which the server has only the uniform means.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Never, Protocol, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nufed.algorithms.server_optimizer import OPTIMIZER_STATE, Plain
from nufed.errors import InputError
from nufed.meta.fine_tuning import Rate, trajectory
from nufed.objective import AnyObjective, Batch, Inputs
from nufed.settings import check_settings

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


class SingleUpdateError(TypeError):
    """A single update was read where only the mean of all is known."""


@dataclass(frozen=True)
class SummedUpdates(Sequence[AgentUpdate]):
    """The updates of ``agents``, of which only the means of their vectors are known.

    It stands in for a sequence of updates: it has their number, and
    :class:`~nufed.algorithms.aggregation.Mean` combines it; single updates can't be read. They are
    unknown with secure aggregation, and otherwise not kept, so that memory does not grow.
    """

    agents: tuple[int, ...]
    means: State

    def __len__(self) -> int:
        return len(self.agents)

    def __getitem__(self, index: object) -> Never:
        raise SingleUpdateError("single updates are not kept: only their mean is known")


__all__ = [
    "AgentContext",
    "AgentResult",
    "AgentUpdate",
    "Algorithm",
    "BatchSource",
    "Context",
    "Cost",
    "Draw",
    "Personal",
    "Places",
    "Shipped",
    "State",
    "TheorySettings",
]


@dataclass(frozen=True)
class Algorithm(ABC):
    """A federated algorithm. Its dataclass fields are its settings (:mod:`nufed.settings`).

    An algorithm must have ``agent_update`` and a field ``batch_size``, and ``server_update`` unless
    the server replaces each vector by its aggregate; everything else has a default for algorithms
    without agent states, whose personal model is the fine-tuned global one.
    """

    receives: ClassVar[Any] = ("model",)  # the server's vectors that an agent receives
    sends: ClassVar[Any] = ("model",)  # the vectors that it sends, each shaped like the server's
    combines: ClassVar[Any] = None
    """Whether ``agent_update``, ``personal_model`` and ``fine_tune`` may run many agents at once:

    * ``None``: one agent at a time;
    * ``"elementwise"``: vectors may be stacks, one row per agent;
    * ``"linearly"``: also, vectors are only linear combinations of gradients and received vectors
      with scalar coefficients, so that they may be in Gram coordinates; ``update_draws`` and
      ``personal_draws`` must then list every draw.

    The claim is verified by a trial of the algorithm before it is used.
    """
    newcomer: ClassVar[str] = "starts from the global model"  # an agent that never took part
    lost_state: ClassVar[str] = "what it had learned itself is lost"  # if an agent loses its state
    optimized: ClassVar[str] = "no loop"  # which of its loops ``optimizer`` drives
    server_model: ClassVar[str] = "model"  # the server's vector that ``server_optimizer`` acts on
    shown_steps: ClassVar[int | None] = None
    """Fine-tuning steps after which its personal model is reported; None: the run's number."""
    personal_data: ClassVar[str | None] = None  # training data that a personal model contains

    set_explicitly: ClassVar[frozenset[str]] = frozenset()
    """Of an object: the settings that it was made with, which ``[method]`` does not change."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        made = super().__new__(cls)
        in_order = (field.name for field in fields(cls) if field.init and not field.kw_only)
        given = {*settings, *(name for name, _ in zip(in_order, args, strict=False))}
        if given:
            object.__setattr__(made, "set_explicitly", frozenset(given))
        return made

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Samples per batch, at most the training samples of every agent."""

    @property
    def server_optimizer(self) -> Plain:
        """The optimiser that the change by ``server_update`` is passed to."""
        return Plain()

    def __post_init__(self) -> None:
        check_settings(self)

    # initial states

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        """The server's state before the first round, from an initial model w.

        It holds every vector in ``receives``, and what the server keeps for itself between rounds.
        """
        return {"model": w}

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        """An agent's state before its first round; empty if it keeps nothing.

        ``objective.base.initial()`` is the initial model, ``received`` the current broadcast.
        """
        return {}

    # a round

    @abstractmethod
    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        """One agent's round: what it sends, its next state, the cost."""

    def server_update(
        self, context: Context, server: State, updates: Sequence[AgentUpdate]
    ) -> State:
        """The server's state after a round, from checked updates sorted by agent.

        The result has the names and shapes of ``server``. Where ``averages_uniformly`` is true, or
        with secure aggregation, only :meth:`aggregate` can read ``updates``.
        """
        names = self.sent_in(context.round)
        found = {name: self.aggregate(context, updates, name, server[name]) for name in names}
        return {**server, **found}

    def aggregate(
        self, context: Context, updates: Sequence[AgentUpdate], name: str, before: Tensor
    ) -> Tensor:
        """The ``aggregation`` of the vectors ``name``, which replace the server's ``before``.

        A rule combines running statistics apart from parameters, so that norms and distances of
        changes count parameters alone. Means have the same values either way.
        """
        rule = self.aggregation  # type: ignore[attr-defined]
        counted = context.counted.get(name, before.numel())
        if counted >= before.numel() or isinstance(updates, SummedUpdates):
            found: Tensor = rule.combine(updates, name, before)
            return found
        blocks = [
            rule.combine(
                [replace(own, vectors={name: own.vectors[name][block]}) for own in updates],
                name,
                before[block],
            )
            for block in (slice(counted), slice(counted, None))
            if before[block].numel()
        ]
        return torch.cat(blocks)

    def counted(self, objective: AnyObjective, server: State) -> dict[str, int]:
        """How many numbers of the vectors that agents send are parameters: the first ones.

        Only vectors that end in tracked running statistics are named
        (:meth:`nufed.Objective.counted`).
        """
        base = objective.base
        if not base.tracks_statistics:
            return {}
        like = [n for n in self.sends if n in server and server[n].shape == (base.size,)]
        return dict.fromkeys(like, base.counted())

    def sent_in(self, round: int) -> Sequence[str]:
        """The vectors sent in this round: all of ``sends``, unless training has phases."""
        found: Sequence[str] = self.sends
        return found

    def initial_server(self, objective: AnyObjective, w: Tensor) -> State:
        """The server's state before the first round, including its optimiser's."""
        server = self.server_init(objective, w)
        optimizer, lr = self.server_optimizer, getattr(self, "server_lr", 1.0)
        if objective.base.tracks_statistics and (optimizer != Plain() or lr > 1):
            name = type(optimizer).__name__.lower()
            given, allowed = (
                (f"server_lr = {lr:g}", "server_lr of at most 1")
                if optimizer == Plain()
                else (f"server_optimizer = {name}", 'server_optimizer = "none"')
            )
            raise InputError(
                f"{given}: the server would step beyond the mean of running statistics, whose "
                f'variances may become negative; use {allowed}, running_stats = "frozen", or a '
                "model with GroupNorm"
            )
        if self.server_model not in server:
            return server
        return {**server, **self.server_optimizer.initial(server[self.server_model])}

    def next_server(self, context: Context, server: State, updates: Sequence[AgentUpdate]) -> State:
        """The server's state after a round: ``server_update``, then its optimiser."""
        after = self.server_update(context, server, updates)
        name = self.server_model
        if name not in after:
            return after
        own = {key: server[key] for key in OPTIMIZER_STATE if key in server}
        model, own = self.server_optimizer.step(server[name], after[name], own)
        return {**after, name: model, **own}

    # evaluation and use

    def global_model(self, objective: AnyObjective, received: State) -> Tensor | None:
        """The global model; None if the server holds no whole model."""
        return received["model"]

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        """The model that an agent would use, before any further fine-tuning.

        ``state`` is None for a newcomer: an agent that never took part in training.
        """
        model = self.global_model(context.objective, received)
        if model is None:
            raise TypeError(
                f"{type(self).__name__} has no global model: it must define personal_model"
            )
        return Personal({"model": model})

    def fine_tune(
        self,
        context: AgentContext,
        received: State,
        personal: State,
        steps: int,
        scale: float = 1.0,
    ) -> Iterator[State]:
        """The personal model after 0 … ``steps`` fine-tuning steps.

        ``scale`` multiplies the step size, as the best one at evaluation may differ from training.
        """
        batches = context.batches.draw("adapt", self.batch_size, steps)
        rate = scale * self.rate(context.objective, received)
        models = trajectory(context.objective, personal["model"], batches, rate)
        return ({**personal, "model": w} for w in models)

    def rate(self, objective: AnyObjective, received: State) -> Rate:
        """The step size of fine-tuning."""
        found: Rate = self.adapt_lr  # type: ignore[attr-defined]
        return found

    def predict(self, objective: AnyObjective, personal: State, inputs: Inputs) -> Tensor:
        """The outputs of a personal model."""
        return objective.predict(personal["model"], inputs)

    # what engines query to prepare batches and trials

    def update_draws(self) -> Sequence[Draw]:
        """Every draw of ``agent_update``; empty if draws are not known in advance."""
        return []

    def personal_draws(self, steps: int) -> Sequence[Draw]:
        """Every draw of ``personal_model`` and ``fine_tune``."""
        return [Draw("adapt", self.batch_size, steps)]

    def smallest_batch(self, samples: int) -> int:
        """The fewest samples in a batch of training, of an agent with so many samples."""
        return min(self.batch_size, samples)

    def for_trial(self) -> Algorithm:
        """A copy whose settings need less memory, for the trial of engines on a large model."""
        return self

    # properties and optional abilities; None: not supported, which the caller reports

    @classmethod
    def keeps_states(cls) -> bool:
        """Whether agents may keep a state between rounds."""
        return cls.agent_init is not Algorithm.agent_init

    @property
    def trained_for(self) -> int:
        """Fine-tuning steps that its model is trained for: its setting ``adapt_steps``, else 1."""
        found: int = getattr(self, "adapt_steps", 1)
        return found

    @property
    def trains_adapt_lr(self) -> bool:
        """Whether training uses ``adapt_lr``, so that a model suits fine-tuning of that size."""
        return getattr(self, "adapt_steps", 0) > 0

    @property
    def initial_rate(self) -> float | None:
        """The step size of fine-tuning before training, ``adapt_lr``; None if not one number."""
        lr = getattr(self, "adapt_lr", None)
        return lr if isinstance(lr, float) else None

    @property
    def fixed_rate(self) -> float | None:
        """The step size of fine-tuning after training; None also if training changes it."""
        return None if getattr(self, "rates_lr", 0) else self.initial_rate

    @property
    def averages_uniformly(self) -> bool:
        """Whether the server uses updates only through their uniform mean."""
        return False

    @property
    def update_copies(self) -> int:
        """Memory of an aggregation that needs all updates of a round, in copies of them."""
        return getattr(getattr(self, "aggregation", None), "copies", 1)

    @property
    def only_fine_tunes(self) -> bool:
        """Whether personal models are the global model after plain gradient steps."""
        own = type(self)
        return (
            own.personal_model is Algorithm.personal_model and own.fine_tune is Algorithm.fine_tune
        )

    @property
    def predicts_plainly(self) -> bool:
        """Whether a personal model's predictions are those of the module with its vector."""
        return type(self).predict is Algorithm.predict

    def diagnose(self, context: AgentContext, received: State, state: State) -> str | None:
        """Where an agent's update became non-finite, and the likely cause; None: unknown."""
        return None

    def doubt(self, context: AgentContext, received: State) -> str | None:
        """Why an agent's finite update may be inaccurate; None if it is not known to be."""
        return None

    def without_checks(self) -> Algorithm:
        """A copy that emits no warnings, for engines that call :meth:`doubt` instead."""
        return self

    def shipped(self, objective: AnyObjective, received: State) -> Shipped | None:
        """The content of a bundle; None if there is no model for newcomers."""
        model = self.global_model(objective, received)
        if model is None:
            return None
        return Shipped(model, self.rate(objective, received))

    def theory(self) -> TheorySettings | None:
        """Its settings in the paper's bounds; None if the bounds do not apply."""
        return None

    def caveat(self, rounds: int) -> str | None:
        """A caveat for readers of results after so many rounds, if any."""
        return None

    def describe(self) -> dict[str, str]:
        """Further settings for tables, by name, beyond the fields."""
        return {}
