"""Base class of algorithms with local gradient steps: settings, batches and the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, TypeAlias

from torch import Tensor

from nufed.algorithms.aggregation import AGGREGATIONS, Aggregation, Mean
from nufed.algorithms.local_optimizer import LOCAL_OPTIMIZERS, SGD, AdamW, Memory, Steps
from nufed.algorithms.protocol import AgentContext, AgentResult, Algorithm, Cost, Draw, Notes, State
from nufed.algorithms.server_optimizer import SERVER_OPTIMIZERS, Plain
from nufed.errors import InputError, require
from nufed.meta.fine_tuning import Rate
from nufed.objective import AnyObjective, Batch, Objective
from nufed.objective.objective import features_of
from nufed.objective.parts import Part
from nufed.settings import STEP_SIZES, setting

Gradient: TypeAlias = Callable[[Tensor, Batch], Tensor]
"""The direction of a local step as a function of the current vector and the batch."""


@dataclass(frozen=True, kw_only=True)
class LocalTraining(Algorithm):
    """An algorithm whose agents take gradient steps; by default as in FedAvg.

    Args:
        meta_lr: β, the step size of a local update.
        local_steps: τ, local updates per round.
        local_epochs: epochs over the agent's training part per round, shuffled, in place of
            ``local_steps``; 0: off.
        batch_size: D, samples per batch.
        optimizer: the optimiser of local steps; plain SGD by default.
        adapt_lr: α, the step size of fine-tuning.
        aggregation: how the server combines the agents' vectors.
        server_optimizer: the optimiser to which the server passes the combined change.
    """

    meta_lr: float = setting(
        0.001, "β, step size of a local update", least=0, search=STEP_SIZES, of_longest_step=0.5
    )
    local_steps: int = setting(4, "τ, local updates per round", least=1)
    local_epochs: int = setting(
        0, "epochs over the training part per round, instead of local_steps; 0: off", least=0
    )
    batch_size: int = setting(40, "D, samples per batch", least=1)
    optimizer: SGD = setting(SGD(), "optimiser of local steps", choices=LOCAL_OPTIMIZERS)
    adapt_lr: Rate = setting(
        0.01, "α, step size of fine-tuning", least=0, search=STEP_SIZES, of_longest_step=0.5
    )
    aggregation: Aggregation = setting(
        Mean(), "how the server combines updates; all but mean are robust", choices=AGGREGATIONS
    )
    server_optimizer: Plain = setting(
        Plain(), "the server's optimiser of the combined change", choices=SERVER_OPTIMIZERS
    )

    notes: ClassVar[Notes] = Notes(optimized="the local steps")
    kept_loops: ClassVar[tuple[str, ...]] = ()
    """Its loops over steps of a whole model whose optimiser's state agents can keep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = f'agents of {type(self).__name__} can\'t keep it; set it to "fresh"'
        possible = bool(self.kept_loops) or not self.optimizer.keeps
        require(possible, "optimizer_state", self.optimizer.optimizer_state, allowed)
        if self.aggregation == Mean("paper"):
            object.__setattr__(self, "aggregation", Mean(self.notes.averaging))

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        """The state of the local optimisers, if agents keep it."""
        if not self.optimizer.keeps:
            return {}
        initial = self.optimizer.initial(received["model"])
        return {f"{loop}.{name}": x for loop in self.kept_loops for name, x in initial.items()}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        """Local steps from the received model, whose result the agent sends, as in FedAvg."""
        state = {**state}
        w = self.descend(context, received["model"], memory=Memory(state))
        return AgentResult({"model": w}, state, Cost(self.steps_per_round(context)))

    @property
    def in_step(self) -> bool:
        """Whether all agents take the same number of steps, also in sum over their rounds."""
        counted = isinstance(self.optimizer, AdamW) and self.optimizer.keeps
        return not (self.local_epochs or counted)

    @property
    def combines(self) -> Literal["elementwise", "linearly"] | None:
        """Elementwise, unless agents of a stack would take different numbers of steps."""
        return "elementwise" if self.in_step else None

    @property
    def combines_linearly(self) -> Literal["elementwise", "linearly"] | None:
        """``combines`` of a subclass whose gradient is a sum of multiples of ∇f and vectors."""
        if not self.in_step:
            return None
        return "linearly" if self.optimizer.linear else "elementwise"

    def steps_per_round(self, context: AgentContext) -> int:
        """How many local steps the agent takes in a round."""
        if self.local_epochs:
            return self.local_epochs * context.epoch(self.batch_size)
        return self.local_steps

    def local_batches(self, context: AgentContext, purpose: str = "outer") -> Iterator[Batch]:
        """One batch per local step: drawn independently, or the batches of epochs."""
        if self.local_epochs:
            for epoch in range(self.local_epochs):
                yield from context.batches.epoch(purpose, self.batch_size, epoch)
        else:
            for t in range(self.local_steps):
                yield from context.batches.draw(purpose, self.batch_size, step=t)

    def start_steps(
        self, context: AgentContext, lr: Rate | None = None, memory: Memory | None = None
    ) -> Steps:
        """The optimiser at the start of a loop of local steps, of size ``meta_lr`` by default."""
        rate = self.meta_lr if lr is None else lr
        return self.optimizer.start(context.objective, rate, context.round, memory)

    def descend(
        self,
        context: AgentContext,
        w: Tensor,
        gradient: Gradient | None = None,
        *,
        lr: Rate | None = None,
        batches: Iterable[Batch] | None = None,
        part: Part | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """w after one local step per batch: w ← w − η·gradient(w, batch), with the optimiser.

        Args:
            context: the agent's.
            w: where to start; it is not changed.
            gradient: the direction; ∇f by default. Of tracked statistics it is ignored.
            lr: η, ``meta_lr`` by default.
            batches: those of :meth:`local_batches` by default.
            part: the coordinates that are trained, all by default; the others stay bit-equal,
                whatever the optimiser does, and do not count in the norm of a gradient.
            memory: where the optimiser keeps its state, if it does; one of ``kept_loops``.
        """
        objective, step = context.objective, self.start_steps(context, lr, memory)
        for batch in self.local_batches(context) if batches is None else batches:
            if gradient is not None:
                g = of_parameters(objective.base, gradient(w, batch))
            elif part is None:
                g = objective.grad(w, batch)
            else:
                g = objective.base.grad(w, batch, part)
            if part is None:
                w = step(w, g, batch)
                continue
            after = part.put(w, step(part.take(w), g if gradient is None else part.take(g)))
            tracked = objective.base.track(after, batch, at=w)
            w = after if tracked is after else part.put(w, part.take(tracked))
        return w

    def step_draws(self, purpose: str = "outer", steps: int | None = None) -> list[Draw]:
        """The draws of one batch per local step, for :meth:`update_draws`."""
        number = self.local_steps if steps is None else steps
        return [Draw(purpose, self.batch_size, 1, t) for t in range(number)]

    def update_draws(self) -> list[Draw]:
        return [] if self.local_epochs else self.step_draws()


def of_parameters(objective: Objective, direction: Tensor) -> Tensor:
    """A direction in which tracked statistics do not move."""
    if not objective.tracks_statistics:
        return direction
    direction = direction.clone()
    direction[..., objective.counted() :] = 0
    return direction


def check_classes(targets: Tensor, method: str) -> None:
    """Refuse targets that are no class numbers."""
    if targets.is_floating_point() or targets.ndim != 1:
        raise InputError(f"{method} needs classes, and the targets are no class numbers")


def labelled_features(context: AgentContext, w: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """The last layer's inputs, flat, and the classes of the agent's whole training part."""
    inputs, labels, _ = context.batches.whole()
    check_classes(labels, method)
    return features_of(context.objective.base, w, inputs).flatten(1), labels.to(w.device)


def smallest_batch(algorithm: Algorithm, samples: int) -> int:
    """The smallest training batch of an agent with this number of samples."""
    size = min(algorithm.batch_size, samples)
    return (samples % size or size) if getattr(algorithm, "local_epochs", 0) else size


def with_one_step(algorithm: Algorithm) -> Algorithm:
    """A copy with one local step per round, if the algorithm has local steps."""
    names = {field.name for field in fields(algorithm) if field.init}
    fewest = {"local_steps": 1, "local_epochs": 0}
    return replace(algorithm, **{name: n for name, n in fewest.items() if name in names})
