"""Ditto: a personal model regularised towards the global one (Li et al., 2021).

The global model w is trained as by FedAvg. Every agent keeps a model v of its own, which starts
from the initial model and is trained in the rounds in which the agent takes part:

    τ_v times:  v ← v − η_v(∇f_i(v) + λ(v − w)).

The server holds and broadcasts w; an agent sends its trained copy of w and keeps v, its personal
model. w in the proximal term is the model that the agent received in that round. A newcomer takes
τ_v steps of v from w.

Known mistakes elsewhere: none is listed here. The tests reject: a proximal term around the agent's
own trained w; v reset in every round; λ missing or with the wrong sign; v sent instead of w; the
global model evaluated as the personal one; a newcomer whose steps are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nufed.algorithms.local_optimizer import Memory
from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import AgentContext, AgentResult, Cost, Draw, Notes, Personal, State
from nufed.meta.fine_tuning import proximal
from nufed.objective import AnyObjective, Batch
from nufed.settings import STEP_SIZES, Search, setting


@dataclass(frozen=True)
class Ditto(LocalTraining):
    """Ditto: every agent trains a personal model near the global one (Li et al., 2021).

    Args:
        weight: λ, the weight of the proximal term.
        personal_lr: η_v, the step size of v.
        personal_steps: τ_v, steps of v per round.
        others: as for :class:`LocalTraining`, of the global model.
    """

    weight: float = setting(
        1.0, "λ, weight of the proximal term", least=0, search=Search(0.01, 10.0)
    )
    personal_lr: float = setting(
        0.001,
        "η_v, step size of the personal model",
        least=0,
        search=STEP_SIZES,
        follows="meta_lr",
    )
    personal_steps: int = setting(
        4, "τ_v, steps of the personal model per round", least=1, follows="local_steps"
    )

    kept_loops: ClassVar[tuple[str, ...]] = ("local", "personal")
    notes: ClassVar[Notes] = Notes(
        newcomer="takes personal_steps steps of v from the global model",
        optimized="steps of w and of v",
        shown_steps=0,
    )

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        kept = super().agent_init(objective, received)
        return {**kept, "personal": objective.base.initial()}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        state = {**state}
        w = self.descend(context, received["model"], memory=Memory(state))
        memory = Memory(state, "personal")
        v = self.personal_update(context, state["personal"], received["model"], memory)
        cost = Cost(self.steps_per_round(context) + self.personal_steps)
        return AgentResult({"model": w}, {**state, "personal": v}, cost)

    def personal_update(
        self, context: AgentContext, v: Tensor, w: Tensor, memory: Memory | None = None
    ) -> Tensor:
        """v after τ_v steps towards a minimum of f_i(v) + λ/2‖v − w‖²."""

        def gradient(v: Tensor, batch: Batch) -> Tensor:
            return proximal(context.objective.grad(v, batch), self.weight, v, centre=w)

        batches = context.draw_each(self._personal_draws())
        lr = self.personal_lr
        return self.descend(context, v, gradient, lr=lr, batches=batches, memory=memory)

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        if state is not None:
            return Personal({"model": state["personal"]})
        w = received["model"]
        return Personal({"model": self.personal_update(context, w, w)}, Cost(self.personal_steps))

    def update_draws(self) -> list[Draw]:
        return [*super().update_draws(), *self._personal_draws()]

    def personal_draws(self, steps: int) -> list[Draw]:
        return [Draw("adapt", self.batch_size, steps), *self._personal_draws()]

    def _personal_draws(self) -> list[Draw]:
        return self.step_draws("personal", self.personal_steps)
