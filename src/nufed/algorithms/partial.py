"""Partial model sharing: the base of FedPer, FedRep, LG-FedAvg, FedBN and FedBABU.

The coordinates of a model w are divided into a private part u of every agent and the shared rest s,
which the server averages. With P_u and P_s the two parts of a vector:

    agent:   w ← (s, u_i);  w ← local training of w;  send P_s w, keep u_i ← P_u w
    server:  s ← mean of P_s w.

Methods differ in which part is private and in the order in which parts are trained. The server
holds s alone; u_i is never sent. The personal model is (s, u_i) with the server's latest s. A
newcomer trains the initial u for a round's local steps with s fixed. Without a private part
(``"none"``, or ``"norm"`` of a model without norm layers) this is FedAvg; with everything private
it is local training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    Checks,
    Cost,
    Draw,
    Notes,
    Personal,
    State,
)
from nufed.objective import AnyObjective, Batch, Objective
from nufed.objective.parts import Part
from nufed.settings import setting

PRIVATE = "part that stays with the agent: head, body, norm, last:2, a pattern, or several"


def divide(objective: Objective, name: str) -> tuple[Part, Part]:
    """A part of the model, and the rest of it."""
    return objective.part(name), objective.part(name, rest=True)


@dataclass(frozen=True, kw_only=True)
class Masked(LocalTraining):
    """An algorithm whose server holds only a part of the model.

    Args:
        private: the part that the server does not hold, as for :meth:`nufed.Objective.part`: a
            name, ``"last:2"``, a pattern of parameter names, or several of these with commas.
        others: as for :class:`LocalTraining`.
    """

    private: str = setting("head", PRIVATE)

    receives: ClassVar[tuple[str, ...]] = ("shared",)
    sends: ClassVar[tuple[str, ...]] = ("shared",)
    notes: ClassVar[Notes] = Notes(optimized="local steps of both parts")

    def parts(self, objective: AnyObjective) -> tuple[Part, Part]:
        """The coordinates u and s."""
        return divide(objective.base, self.private)

    def join(self, objective: AnyObjective, s: Tensor, u: Tensor) -> Tensor:
        """The model (s, u); of a stack, row by row."""
        private, shared = self.parts(objective)
        w = s.new_empty((*s.shape[:-1], objective.base.size))
        shared.fill(w, s)
        private.fill(w, u)
        return w

    def initial_private(self, objective: AnyObjective) -> Tensor:
        """u of the initial model."""
        return self.parts(objective)[0].take(objective.base.initial()).clone()

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        return {"shared": self.parts(objective)[1].take(w).clone()}

    def server_part(self, objective: AnyObjective) -> Part:
        return self.parts(objective)[1]

    @property
    def checks(self) -> MaskedChecks:
        return MaskedChecks(self)


@dataclass(frozen=True)
class MaskedChecks(Checks):
    """Doubts a private part that the model does not have."""

    algorithm: Masked

    def doubt(self, context: AgentContext, received: State) -> str | None:
        private = self.algorithm.private
        if private == "none" or self.algorithm.parts(context.objective)[0].size:
            return None
        return f"private = {private!r}: the model has no such part, so that this is FedAvg"


@dataclass(frozen=True, kw_only=True)
class PrivatePart(Masked):
    """An algorithm whose agents keep a private part of the model."""

    notes: ClassVar[Notes] = replace(
        Masked.notes,
        newcomer="trains the initial private part, with the shared one fixed",
        shown_steps=0,
    )

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        return {"private": self.initial_private(objective)}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        private, shared = self.parts(context.objective)
        w = self.join(context.objective, received["shared"], state["private"])
        w, cost = self.train(context, w)
        return AgentResult({"shared": shared.keep(w)}, {"private": private.keep(w)}, cost)

    def train(self, context: AgentContext, w: Tensor) -> tuple[Tensor, Cost]:
        """The agent's model after a round; by default both parts are trained together."""
        return self.descend(context, w), Cost(self.steps_per_round(context))

    def global_model(self, objective: AnyObjective, received: State) -> Tensor | None:
        return None if self.parts(objective)[0].size else received["shared"]

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        objective, s = context.objective, received["shared"]
        private, _ = self.parts(objective)
        if state is not None or not private.size:
            u = self.initial_private(objective) if state is None else state["private"]
            return Personal({"model": self.join(objective, s, u)})
        w = self.join(objective, s, self.initial_private(objective))
        batches = list(self.newcomer_batches(context))
        w = self.descend(context, w, part=private, batches=batches)
        return Personal({"model": w}, Cost(len(batches)))

    def newcomer_batches(self, context: AgentContext) -> Iterator[Batch]:
        """The batches on which a newcomer trains its private part."""
        return self.local_batches(context, "personal")

    def personal_draws(self, steps: int) -> list[Draw]:
        return [Draw("adapt", self.batch_size, steps), *self.step_draws("personal")]
