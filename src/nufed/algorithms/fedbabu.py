"""FedBABU: the body is trained with the head fixed at its initial values (Oh et al., 2022).

With θ_ext the body and θ_cls the head, which keeps its initial values θ⁰_cls everywhere,

    agent:   τ times:  θ_ext ← θ_ext − η∇_ext f_i(θ_ext, θ⁰_cls)
    server:  θ_ext ← mean of the agents' θ_ext.

The server holds and broadcasts the body; the head is that of the initial model, which all agents
have, and agents keep nothing. So the server has a whole model, (θ_ext, θ⁰_cls). The personal model
is that model after fine-tuning: of all of it, as the paper recommends, or of the part that
``fine_tuned`` names, for as many steps as the run evaluates. A newcomer does the same.
``optimizer`` drives the steps of the body; fine-tuning takes plain steps of size ``adapt_lr``.

Known mistakes elsewhere: the head's gradient is set to zero and the optimiser then updates the
whole model (FL-bench), so that weight decay shrinks a head that should keep its values; averaging
the head too, which changes its last bits by rounding; a new random head for every agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nufed.algorithms.partial import Masked
from nufed.algorithms.protocol import AgentContext, AgentResult, Cost, Notes, State
from nufed.meta.fine_tuning import Rate
from nufed.objective import AnyObjective
from nufed.settings import setting


@dataclass(frozen=True, kw_only=True)
class FedBABU(Masked):
    """FedBABU: trains the body under the initial head, then fine-tunes both (Oh et al., 2022).

    Args:
        private: θ_cls, the part that keeps its initial values in training.
        fine_tuned: the part that fine-tuning changes.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η, ``local_steps`` τ.
    """

    private: str = setting("head", "part that keeps its initial values in training")
    fine_tuned: str = setting("all", "part that fine-tuning changes")

    notes: ClassVar[Notes] = Notes(
        newcomer="fine-tunes the global model",
        optimized="local steps of the body",
        averaging="samples",
    )

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        _, shared = self.parts(context.objective)
        w = self.whole(context.objective, received)
        w = self.descend(context, w, part=shared)
        return AgentResult({"shared": shared.take(w)}, state, Cost(self.steps_per_round(context)))

    def whole(self, objective: AnyObjective, received: State) -> Tensor:
        """(θ_ext, θ⁰_cls)."""
        return self.join(objective, received["shared"], self.initial_private(objective))

    def global_model(self, objective: AnyObjective, received: State) -> Tensor:
        return self.whole(objective, received)

    def rate(self, objective: AnyObjective, received: State) -> Rate:
        """α on the part that is fine-tuned, 0 elsewhere."""
        if self.fine_tuned == "all":
            return self.adapt_lr
        ones = torch.ones(objective.base.size, dtype=objective.base.dtype)
        mask = objective.base.part(self.fine_tuned).only(ones)
        return mask.to(received["shared"].device) * self.adapt_lr
