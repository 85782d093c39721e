"""FedDyn: a dynamic regulariser makes agents agree on the joint optimum (Acar et al., 2021).

With the agent's correction g_i and the server's h, both 0 at the start,

    y ← w;  τ times:  y ← y − η(∇f_i(y) − g_i + α(y − w))       a step on their risk 𝔯_i
    g_i ← g_i − α(y − w)                                         ∇f_i(y), where y minimises 𝔯_i
    h ← h − (α/N) Σ_{i in cohort} (y_i − w),   w ← mean of y_i − h/α.

The agent keeps g_i and sends y, as in FedAvg; the server keeps h and broadcasts w. The new g_i
replaces the old one once the server has accepted the update, so that h stays the mean of all **N**
agents' g_i under partial participation and rejected updates. At a fixed point y_i = w and h = 0:
the gradients ∇f_i(w) = g_i sum to 0. From h = 0 with full participation w⁺ = w + 2·mean(y_i − w).
With few local steps, which stay far from the minimum of 𝔯_i, h acts like a momentum of decay
ητα, so that a small α is slow to forget: the default is the largest of the paper's 0.001 to 0.1.

h follows the uniform mean, whatever rule combines the models. Running statistics of BatchNorm are
averaged as part of the model and have no correction. The optimiser drives the steps of y. The
personal model is the global one, fine-tuned by plain steps; a newcomer does the same. A local step
costs one gradient, as in FedAvg. What the server sees of an agent is y, as in FedAvg; from all of
its y it could compute g_i.

The authors' code keeps −g_i/α in place of g_i. It divides α by the agent's share of samples, which
minimises the joint loss over samples; here as in the paper all agents weigh the same. Beside w it
reports the mean of y_i, which is not w.

Known mistakes elsewhere: h moved by Σy_i − w, without the factor |cohort| of w, so that it does not
vanish where models agree ([FedLab #319](https://github.com/SMILELab-FL/FedLab/issues/319), after
the parentheses of the paper's line 11; [PFLlib #29](https://github.com/TsingZ0/PFLlib/issues/29)
asks the same); the penalty without its square, α/2·‖y − w‖ (PFLlib). The tests also reject: h of
the mean over the cohort; g_i never stored; the wrong sign of g_i or h; h/α missing from w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nufed.algorithms.aggregation import Mean
from nufed.algorithms.local_optimizer import Memory
from nufed.algorithms.local_training import LocalTraining, of_parameters
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    Context,
    Cost,
    Notes,
    State,
    Updates,
)
from nufed.meta.fine_tuning import proximal
from nufed.objective import AnyObjective, Batch
from nufed.settings import Search, setting


@dataclass(frozen=True, kw_only=True)
class FedDyn(LocalTraining):
    """FedDyn: a dynamic regulariser makes agents agree on the joint optimum (Acar et al., 2021).

    Args:
        weight: α, the weight of the regulariser.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η, ``local_steps`` is τ.
    """

    weight: float = setting(
        0.1, "α, weight of the dynamic regulariser", above=0, search=Search(1e-2, 1.0)
    )

    kept_loops: ClassVar[tuple[str, ...]] = ("local",)
    notes: ClassVar[Notes] = Notes(
        newcomer="fine-tunes the global model; it has no correction",
        lost_state="the server's h is no longer the mean of the agents' corrections, which biases "
        "all later rounds; start a new run to remove the bias",
        optimized="the local steps",
    )

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        return {"model": w, "h": torch.zeros_like(w)}

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        kept = super().agent_init(objective, received)
        return {**kept, "correction": torch.zeros_like(received["model"])}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        w, g_i, state = received["model"], state["correction"], {**state}

        def gradient(y: Tensor, batch: Batch) -> Tensor:
            return proximal(context.objective.grad(y, batch) - g_i, self.weight, y, centre=w)

        y = self.descend(context, w, gradient, memory=Memory(state))
        moved = of_parameters(context.objective.base, y - w)
        state["correction"] = g_i - self.weight * moved
        return AgentResult({"model": y}, state, Cost(self.steps_per_round(context)))

    def server_update(self, context: Context, server: State, updates: Updates) -> State:
        w, h = server["model"], server["h"]
        y = self.aggregate(context, updates, "model", w)
        moved = Mean().combine(updates, "model", w) - w
        moved[context.counted.get("model", len(w)) :] = 0  # statistics have no correction
        h = h - self.weight * len(updates) / context.agents * moved
        return {"model": y - h / self.weight, "h": h}
