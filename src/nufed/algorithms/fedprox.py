"""FedProx: a proximal term keeps local steps near the global model (Li et al., 2020).

Every agent takes τ steps towards a minimum of f_i(y) + μ/2‖y − w‖², from the model w that it
received, which is fixed during the round:

    y ← w;  τ times:  y ← y − η(∇f_i(y) + μ(y − w)),      w ← mean(y).

The server holds and broadcasts w; agents send y and keep nothing. μ = 0 is FedAvg. The personal
model is the global one, fine-tuned by plain steps without the proximal term; a newcomer does the
same. The optimiser drives the steps of y, with ∇f_i + μ(y − w) as its gradient. The paper lets slow
agents stop early (γ-inexactness); here all take the same number of steps or epochs.

Known mistakes elsewhere: the penalty without its square, μ/2·Σ‖y_l − w_l‖ over layers, whose
gradient has the same norm at any distance (the example in Flower's reference of its FedProx
strategy); a generator of parameters as w, which is exhausted after one batch, so that the term
vanishes (the same example); the penalty computed from ``.data``, which has no gradient (FedShare,
corrected later). The tests also reject: μ without its ½, that is 2μ in the gradient; a w that moves
with y.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from nufed.algorithms.local_optimizer import Memory
from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import AgentContext, AgentResult, Cost, Notes, State
from nufed.meta.fine_tuning import proximal
from nufed.objective import Batch
from nufed.settings import Search, setting


@dataclass(frozen=True)
class FedProx(LocalTraining):
    """FedProx: a proximal term keeps local steps near the global model (Li et al., 2020).

    Args:
        weight: μ, the weight of the proximal term.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η, ``local_steps`` is τ.
    """

    weight: float = setting(
        0.1, "μ, weight of the proximal term", least=0, search=Search(1e-3, 10.0)
    )

    kept_loops: ClassVar[tuple[str, ...]] = ("local",)
    notes: ClassVar[Notes] = replace(LocalTraining.notes, newcomer="fine-tunes the global model")
    combines = LocalTraining.combines_linearly

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        w, state = received["model"], {**state}

        def gradient(y: Tensor, batch: Batch) -> Tensor:
            return proximal(context.objective.grad(y, batch), self.weight, y, centre=w)

        y = self.descend(context, w, gradient, memory=Memory(state))
        return AgentResult({"model": y}, state, Cost(self.steps_per_round(context)))
