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
``received`` holds the server's vectors named by ``Algorithm.receives``, which are the same for all
agents, what ``Algorithm.downlink`` adds for this one, and nothing else. The types of arguments and
results come first, then the optional objects by which an algorithm says more (:class:`Notes`,
:class:`Checks`, :class:`Adaptation`, :class:`TheorySettings`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import get_annotations
from typing import Any, ClassVar, Literal, NamedTuple, Never, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nufed.algorithms.server_optimizer import Plain
from nufed.errors import InputError
from nufed.meta.fine_tuning import Rate, trajectory
from nufed.objective import AnyObjective, Batch, Inputs
from nufed.objective.parts import Part
from nufed.settings import RemembersSettings, check_settings, follow_settings

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


Updates: TypeAlias = Sequence[AgentUpdate]
"""Checked updates of a round, sorted by agent."""


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


Pool: TypeAlias = Literal["all", "resampled", "support", "query"]
"""What a batch is drawn from: the whole training part, without or with replacement, or one of its
two random halves, which are the same for all draws of a step."""

HALVES: tuple[Pool, Pool] = ("support", "query")


class Draw(NamedTuple):
    """The arguments of one call of :meth:`BatchSource.draw`."""

    purpose: str
    size: int
    number: int = 1
    step: int = 0
    pool: Pool = "all"


class BatchSource(Protocol):
    """One agent's training data in one round, as seeded batches."""

    @property
    def agent(self) -> int | Tensor:
        """The agent's number; for a stack of agents, a column of numbers."""

    def draw(
        self, purpose: str, size: int, number: int = 1, step: int = 0, pool: Pool = "all"
    ) -> list[Batch]:
        """``number`` independent batches of ``size`` samples, without replacement inside a batch.

        The same purpose and step give the same batches to every algorithm, and a larger ``number``
        only appends to them. From another ``pool`` than all samples, a batch of ``"resampled"``
        ones is drawn with replacement, and one from a half has at most half of the samples.
        """

    def epoch(self, purpose: str, size: int, index: int = 0, share: float = 1.0) -> list[Batch]:
        """All training samples, shuffled, as batches of ``size``; the last may be smaller.

        ``index`` numbers the epochs of a round. With a ``share`` below 1, a random subset of that
        share, rounded up. Not defined for a stack of agents.
        """

    def take(self, places: Places, seed: int | None = None) -> Batch:
        """Samples of the training part, by their places in it, as a batch with this seed.

        Not defined for a stack of agents.
        """

    def whole(self) -> Batch:
        """The agent's whole training part, in a fixed order. Not defined for a stack of agents."""

    def targets(self) -> Tensor:
        """The targets of the whole training part. Not defined for a stack of agents."""

    def stream(self, purpose: str, step: int = 0) -> np.random.Generator:
        """A random generator of this agent and round, for anything that is not a batch."""


@dataclass(frozen=True)
class Context:
    """What the server knows in a round besides vectors.

    Args:
        round: the number k of the round, from 1; 0 at evaluation.
        agents: N, how many agents take part in training.
        cohort: how many of them are picked in a round; 0 at evaluation.
        counted: of vectors that end in running statistics, how many numbers are parameters
            (:func:`nufed.server.counted_parameters`).
        seed: of the training, for the server's own draws.
    """

    round: int
    agents: int
    cohort: int
    counted: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    seed: int = field(default=0, kw_only=True)


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
class Notes:
    """Facts about an algorithm for reports and messages.

    Args:
        newcomer: what an agent that never took part in training does.
        lost_state: what it means that an agent lost its state.
        optimized: which of its loops ``optimizer`` drives.
        shown_steps: fine-tuning steps after which its personal model is reported; None: the run's
            number.
        personal_data: training data that a personal model contains.
        caveat: of the algorithm and the number of rounds: a caveat for readers of results.
        settings: of the algorithm: further settings for tables, by name, beyond the fields.
        theory: of the algorithm: its settings in the paper's bounds; None if they do not apply.
        averaging: the weights of agents in its paper, which ``averaging = "paper"`` takes.
    """

    newcomer: str = "starts from the global model"
    lost_state: str = "what it had learned itself is lost"
    optimized: str = "no loop"
    shown_steps: int | None = None
    personal_data: str | None = None
    caveat: Callable[[Any, int], str | None] = lambda algorithm, rounds: None
    settings: Callable[[Any], Mapping[str, str]] = lambda algorithm: {}
    theory: Callable[[Any], TheorySettings | None] = lambda algorithm: None
    averaging: Literal["uniform", "samples"] = "uniform"


@dataclass(frozen=True)
class Checks:
    """Numerical diagnostics of ``algorithm``; by default there are none."""

    algorithm: Algorithm

    def diagnose(self, context: AgentContext, received: State, state: State) -> str | None:
        """Where an agent's update became non-finite, and the likely cause; None: unknown."""
        return None

    def doubt(self, context: AgentContext, received: State) -> str | None:
        """Why an agent's finite update may be inaccurate; None if there is no sign of it."""
        return None

    def without_warnings(self) -> Algorithm:
        """A copy that emits no warnings, for engines that call :meth:`doubt` instead."""
        return self.algorithm

    def for_trial(self) -> Algorithm:
        """A copy whose settings need less memory, for the trial of engines on a large model."""
        return self.algorithm


@dataclass(frozen=True)
class Adaptation:
    """The fine-tuning that a model is trained for.

    Args:
        steps: ν; 0: training uses no fine-tuning, nor its step size.
        lr: the step size of fine-tuning before training; None if it is not one number.
        learned: whether training changes the step size.
    """

    steps: int = 0
    lr: float | None = None
    learned: bool = False

    @property
    def fixed_lr(self) -> float | None:
        """The step size of fine-tuning after training; None also if training changes it."""
        return None if self.learned else self.lr


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


_REPLACED = {
    "newcomer lost_state optimized shown_steps personal_data caveat": "say it in `notes`",
    "describe": "say it in `notes`, as `settings`",
    "theory": "say it in `notes`, as `theory`",
    "diagnose doubt for_trial": "define it in the object that `checks` returns",
    "without_checks": "define it in the object that `checks` returns, as `without_warnings`",
    "trained_for trains_adapt_lr": "say it in `adaptation`, as `steps`",
    "initial_rate fixed_rate": "say it in `adaptation`, as `lr` and `learned`",
    "initial_server next_server": "define server_init, server_update or server_optimizer",
    "server_model": '"model", or else the first of `receives`, is the server\'s model',
    "counted": "say in `server_part` which coordinates of the model the server holds",
    "averages_uniformly": "a trial of server_update shows it",
    "update_copies": "an aggregation rule says it in `copies`",
    "keeps_states only_fine_tunes predicts_plainly smallest_batch": "it follows from the others",
}
REMOVED = {name: instead for names, instead in _REPLACED.items() for name in names.split()}
"""Members of an older protocol, and what replaces each."""


@dataclass(frozen=True)
class Algorithm(RemembersSettings, ABC):
    """A federated algorithm. Its dataclass fields are its settings (:mod:`nufed.settings`).

    An algorithm must have ``agent_update`` and a field ``batch_size``, and ``server_update`` unless
    the server replaces each vector by its aggregate; everything else has a default for algorithms
    without agent states, whose personal model is the fine-tuned global one.
    """

    receives: ClassVar[Any] = ("model",)  # the server's vectors that every agent receives
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
    notes: ClassVar[Notes] = Notes()

    def __init_subclass__(cls) -> None:
        """Refuse members of an older protocol, which nothing would call."""
        super().__init_subclass__()
        for name, instead in REMOVED.items():
            if hasattr(cls, name) or name in get_annotations(cls):
                raise InputError(
                    f"{cls.__module__}.{cls.__qualname__} defines {name!r}, which is not part of "
                    f"nufed.algorithms.Algorithm any more: {instead}"
                )

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Samples per batch, at most the training samples of every agent."""

    @property
    def server_optimizer(self) -> Plain:
        """The optimiser that the model's change by ``server_update`` is passed to."""
        return Plain()

    def __post_init__(self) -> None:
        follow_settings(self)
        check_settings(self)

    # initial states

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        """The server's state before the first round, from an initial model w.

        It holds every vector in ``receives`` and ``sends``, and what the server keeps for itself
        between rounds. A dimension of length 0 may grow in ``server_update``.
        """
        return {"model": w}

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        """An agent's state before its first round; empty if it keeps nothing.

        ``objective.base.initial()`` is the initial model, ``received`` the current broadcast.
        """
        return {}

    # a round

    def downlink(self, context: Context, server: State, agent: int | None) -> State:
        """What the server sends to this agent alone, in addition to the vectors in ``receives``.

        At evaluation, ``context`` says no more than round 0. ``agent`` is None for any newcomer, as
        in a bundle; names and shapes are the same for all. It is called for the agents of a cohort
        or an evaluation only. Secure aggregation and ``[privacy]`` refuse an algorithm that defines
        it: it shows one agent what the server knows of single others.
        """
        return {}

    @abstractmethod
    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        """One agent's round: what it sends, its next state, the cost."""

    def server_update(self, context: Context, server: State, updates: Updates) -> State:
        """The server's state after a round, from checked updates sorted by agent.

        The result has the names and shapes of ``server``, but for dimensions that began with
        length 0. Where a trial shows that only
        :meth:`aggregate` reads ``updates``, and by their uniform mean, single ones are not kept.
        """
        names = self.sent_in(context.round)
        return {**server} | {n: self.aggregate(context, updates, n, server[n]) for n in names}

    def aggregate(self, context: Context, updates: Updates, name: str, before: Tensor) -> Tensor:
        """The ``aggregation`` of the vectors ``name``, which replace the server's ``before``.

        A rule combines running statistics apart from parameters, so that norms and distances of
        changes count parameters alone. Means have the same values either way.
        """
        rule = self.aggregation  # type: ignore[attr-defined]
        counted = context.counted.get(name, before.numel())
        if counted >= before.numel() or isinstance(updates, SummedUpdates):
            combined: Tensor = rule.combine(updates, name, before)
            return combined
        blocks = [
            rule.combine(
                [replace(each, vectors={name: each.vectors[name][block]}) for each in updates],
                name,
                before[block],
            )
            for block in (slice(counted), slice(counted, None))
            if before[block].numel()
        ]
        return torch.cat(blocks)

    def sent_in(self, round: int) -> Sequence[str]:
        """The vectors sent in this round: all of ``sends``, unless training has phases."""
        every: Sequence[str] = self.sends
        return every

    def server_part(self, objective: AnyObjective) -> Part | None:
        """The coordinates of the model that the server's model holds; None: all."""
        return None

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
        self, context: AgentContext, received: State, personal: State, steps: int, scale: float = 1
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
        lr: Rate = self.adapt_lr  # type: ignore[attr-defined]
        return lr

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

    # use by others, and what more it can say

    def shipped(self, objective: AnyObjective, received: State) -> Shipped | None:
        """The content of a bundle; None if there is no model for newcomers."""
        model = self.global_model(objective, received)
        if model is None:
            return None
        return Shipped(model, self.rate(objective, received))

    @property
    def adaptation(self) -> Adaptation:
        """The fine-tuning that its model is trained for, read from its settings."""
        lr = getattr(self, "adapt_lr", None)
        lr = lr if isinstance(lr, float) else None
        return Adaptation(getattr(self, "adapt_steps", 0), lr, bool(getattr(self, "rates_lr", 0)))

    @property
    def checks(self) -> Checks:
        """Its numerical diagnostics."""
        return Checks(self)


def draws_halves(algorithm: Algorithm) -> bool:
    """Whether local updates draw from halves of the training part."""
    return any(draw.number and draw.pool in HALVES for draw in algorithm.update_draws())


def defines(algorithm: Algorithm | type[Algorithm], *names: str) -> bool:
    """Whether an algorithm has any of these functions from elsewhere than :class:`Algorithm`.

    >>> from nufed.algorithms import Ditto, GMeta
    >>> defines(GMeta, "personal_model", "fine_tune"), defines(Ditto(), "agent_init")
    (False, True)
    """
    cls = algorithm if isinstance(algorithm, type) else type(algorithm)
    return any(getattr(cls, name) is not getattr(Algorithm, name) for name in names)
