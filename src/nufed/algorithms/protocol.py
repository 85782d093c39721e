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
``received`` holds the server's vectors named by ``Algorithm.receives``, and nothing else. What
functions take and return is in :mod:`nufed.algorithms.round_records`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from nufed.algorithms.round_records import (
    AgentContext,
    AgentResult,
    AgentUpdate,
    BatchSource,
    Context,
    Cost,
    Draw,
    Personal,
    Shipped,
    State,
    TheorySettings,
)
from nufed.algorithms.server_optimizer import OPTIMIZER_STATE, Plain
from nufed.errors import InputError
from nufed.meta.fine_tuning import Rate, trajectory
from nufed.objective import AnyObjective, Inputs
from nufed.settings import check_settings

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
    "Shipped",
    "State",
    "TheorySettings",
]


@dataclass(frozen=True)
class Algorithm(ABC):
    """A federated algorithm. Its dataclass fields are its settings (:mod:`nufed.settings`).

    An algorithm must have ``agent_update`` and a field ``batch_size``, and ``server_update`` unless
    the server takes the aggregate of each vector; everything else has a default that suits
    algorithms without agent states, whose personal model is the fine-tuned global one.
    """

    receives: ClassVar[Any] = ("model",)  # the server's vectors that an agent receives
    sends: ClassVar[Any] = ("model",)  # what it sends back, each shaped like the server's
    combines: ClassVar[Any] = None
    """Whether ``agent_update``, ``personal_model`` and ``fine_tune`` may run many agents at once:

    * ``None``: one agent at a time;
    * ``"elementwise"``: vectors may be stacks, one row per agent;
    * ``"linearly"``: also only sums and plain multiples of gradients and of what was received are
      taken, so that vectors may stand in Gram coordinates; ``update_draws`` and ``personal_draws``
      must then name every draw.

    The claim is tried on the algorithm at hand before it is used.
    """
    newcomer: ClassVar[str] = "starts from the global model"  # an agent that never took part
    lost_state: ClassVar[str] = "what it had learned itself is lost"  # of an agent that restarts
    optimized: ClassVar[str] = "no loop"  # which of its loops ``optimizer`` drives
    server_model: ClassVar[str] = "model"  # the server's vector that ``server_optimizer`` acts on
    shown_steps: ClassVar[int | None] = None
    """Fine-tuning steps after which its personal model is shown; None: the run's number."""
    personal_data: ClassVar[str | None] = None  # what a personal model holds of training data

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Samples per batch, at most what every agent has for training."""

    @property
    def server_optimizer(self) -> Plain:
        """What the server makes of the change that ``server_update`` gives; a setting, if any."""
        return Plain()

    def __post_init__(self) -> None:
        check_settings(self)

    # initial states

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        """The server's state before the first round, from an initial model."""
        return {"model": w}

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        """An agent's state before its first round; empty if it keeps nothing.

        ``objective.base.initial()`` is the initial model, ``received`` what the agent receives now.
        """
        return {}

    # a round

    @abstractmethod
    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        """One agent's work in one round."""

    def server_update(
        self, context: Context, server: State, updates: Sequence[AgentUpdate]
    ) -> State:
        """The server's state after a round, from checked updates in the order of agents."""
        rule = self.aggregation  # type: ignore[attr-defined]
        names = self.sent_in(context.round)
        return {**server, **{name: rule.combine(updates, name, server[name]) for name in names}}

    def sent_in(self, round: int) -> Sequence[str]:
        """What an agent sends in this round: all of ``sends``, unless training has phases."""
        found: Sequence[str] = self.sends
        return found

    def initial_server(self, objective: AnyObjective, w: Tensor) -> State:
        """The whole state of the server before the first round, with its optimiser's."""
        server = self.server_init(objective, w)
        optimizer = self.server_optimizer
        if objective.base.tracks_statistics and optimizer != Plain():
            raise InputError(
                f"server_optimizer = {type(optimizer).__name__.lower()}: it would step on running "
                'statistics, which are no gradients; use server_optimizer = "none", '
                'running_stats = "frozen", or a model with GroupNorm'
            )
        if self.server_model not in server:
            return server
        return {**server, **self.server_optimizer.initial(server[self.server_model])}

    def next_server(self, context: Context, server: State, updates: Sequence[AgentUpdate]) -> State:
        """The whole state of the server after a round: ``server_update``, then its optimiser."""
        after = self.server_update(context, server, updates)
        name = self.server_model
        if name not in after:
            return after
        own = {key: server[key] for key in OPTIMIZER_STATE if key in server}
        model, own = self.server_optimizer.step(server[name], after[name], own)
        return {**after, name: model, **own}

    # evaluation and use

    def global_model(self, objective: AnyObjective, received: State) -> Tensor | None:
        """The model that all agents share; None if the server holds no whole model."""
        return received["model"]

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        """The model that an agent would use, before any further fine-tuning.

        ``state`` is None for a newcomer: an agent that never took part in training.
        """
        model = self.global_model(context.objective, received)
        if model is None:
            raise TypeError(f"{type(self).__name__} has no global model: it must say what is used")
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

        ``scale`` multiplies the step size: the best one at use need not be the one of training.
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

    # what engines may ask, so that they can prepare

    def update_draws(self) -> Sequence[Draw]:
        """Every draw of ``agent_update``; empty if it is not known beforehand."""
        return []

    def personal_draws(self, steps: int) -> Sequence[Draw]:
        """Every draw of ``personal_model`` and ``fine_tune``."""
        return [Draw("adapt", self.batch_size, steps)]

    def for_trial(self) -> Algorithm:
        """The same with settings that need less memory, to try engines on a large model with."""
        return self

    # what others may ask; what an algorithm can't do is None, and whoever asked says so

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
    def initial_rate(self) -> float | None:
        """The step size of fine-tuning before training, ``adapt_lr``; None if not one number."""
        lr = getattr(self, "adapt_lr", None)
        return lr if isinstance(lr, float) else None

    @property
    def fixed_rate(self) -> float | None:
        """The same after training; None also if training changes it."""
        return None if getattr(self, "rates_lr", 0) else self.initial_rate

    @property
    def averages_uniformly(self) -> bool:
        """Whether the server uses updates only through their uniform mean."""
        return False

    @property
    def only_fine_tunes(self) -> bool:
        """Whether its personal models are the global one after plain gradient steps."""
        own = type(self)
        return (
            own.personal_model is Algorithm.personal_model and own.fine_tune is Algorithm.fine_tune
        )

    @property
    def predicts_plainly(self) -> bool:
        """Whether a personal model predicts as the module with its vector does."""
        return type(self).predict is Algorithm.predict

    def diagnose(self, context: AgentContext, received: State, state: State) -> str | None:
        """Where an agent's work became non-finite and the likely cause; None: not known."""
        return None

    def doubt(self, context: AgentContext, received: State) -> str | None:
        """What is wrong with the numbers behind an agent's work, though they are finite."""
        return None

    def without_checks(self) -> Algorithm:
        """The same without warnings of its own, for engines that call :meth:`doubt` instead."""
        return self

    def shipped(self, objective: AnyObjective, received: State) -> Shipped | None:
        """What a bundle holds; None if there is no model that a newcomer could start from."""
        model = self.global_model(objective, received)
        if model is None:
            return None
        return Shipped(model, self.rate(objective, received))

    def theory(self) -> TheorySettings | None:
        """The settings that the paper's bounds are about; None if they do not cover it."""
        return None

    def caveat(self, rounds: int) -> str | None:
        """What a reader of results should know about a training of so many rounds, if anything."""
        return None

    def describe(self) -> dict[str, str]:
        """What it is trained with beyond its fields, for tables; by name."""
        return {}
