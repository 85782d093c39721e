"""FedNova: changes are normalised by the agents' numbers of local steps (Wang et al., 2020).

Where agents take different numbers τ_i of local steps, as with ``local_epochs`` and unequal
amounts of data, FedAvg weights them by τ_i and minimises another objective. FedNova normalises:

    y_i ← w;  τ_i times:  y_i ← y_i − η∇f_i(y_i),      d_i = (w − y_i)/a_i
    w ← w − τ_eff·mean(d_i),   τ_eff = mean(a_i),

with a_i = τ_i for plain steps. With momentum ρ a_i is the paper's ‖a_i‖₁ = Σ_{k=1}^τ (1 − ρᵏ)/(1 −
ρ), and for any optimiser how far τ_i steps of size 1 carry a coordinate whose gradient is always 1.
Weight decay and clipping belong to the gradient and do not change a_i; nor does a schedule, which
is the same for all agents. Agents with equal a_i give FedAvg to rounding.

On quadratics with curvature λ_i an agent's weight in the fixed point is (1 − (1 − ηλ_i)^τ_i)/(ητ_i)
where FedAvg's has no τ_i: as η → 0 it tends to λ_i, the weight in the joint optimum, and FedAvg's
to τ_i·λ_i. For a finite η FedNova is biased, too: it removes the effect of unequal steps alone.

The server broadcasts w and the last τ_eff, from which the grid of sums follows; an agent sends w −
d_i and a_i, one number more than in FedAvg, and keeps nothing. Local steps cost what they do there.
The server needs the means alone, so that secure aggregation may sum them. a_i tells about how many
samples an agent has. Running statistics of BatchNorm are averaged as they are. The paper weights
agents by samples (``averaging = "samples"``, here of d_i and of a_i). Its proximal local steps and
server momentum are not implemented (``server_optimizer = "avgm"`` is). The personal model is the
global one, fine-tuned by plain steps; a newcomer does the same.

Known mistakes elsewhere: whether cumulative steps or gradients are to be divided was asked of the
authors' code ([FedNova #1](https://github.com/JYWa/FedNova/issues/1)): it is the former, the
change itself. That code adds its proximal term into the momentum buffer. FedLab multiplies the mean
of d_i by N/|cohort|, which lengthens the step under partial participation. The tests also reject:
τ_eff missing; a_i of the settings instead of the steps taken; τ_i in place of ‖a_i‖₁ with momentum;
τ_eff of the round before; statistics divided by a_i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    Context,
    Cost,
    Notes,
    State,
    Updates,
)
from nufed.objective import AnyObjective


@dataclass(frozen=True, kw_only=True)
class FedNova(LocalTraining):
    """FedNova: changes are normalised by the agents' numbers of local steps (Wang et al., 2020).

    Args:
        others: as for :class:`LocalTraining`; ``meta_lr`` is η.
    """

    receives: ClassVar[tuple[str, ...]] = ("model", "steps")
    sends: ClassVar[tuple[str, ...]] = ("model", "steps")
    notes: ClassVar[Notes] = replace(
        LocalTraining.notes, newcomer="fine-tunes the global model", averaging="samples"
    )

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        return {"model": w, "steps": w.new_ones(1)}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        w, counted = received["model"], context.objective.base.counted()
        y, steps = self.descend(context, w), self.steps_per_round(context)
        a_i = self.path_length(context, steps)
        normalised = w + (y - w) / a_i
        normalised[..., counted:] = y[..., counted:]  # running statistics
        vectors = {"model": normalised, "steps": y.new_full((*y.shape[:-1], 1), a_i)}
        return AgentResult(vectors, state, Cost(steps))

    def path_length(self, context: AgentContext, steps: int) -> float:
        """‖a_i‖₁: how far the optimiser carries a coordinate whose gradient is always 1."""
        plain = replace(self.optimizer, weight_decay=0.0, clip_norm=0.0)
        step = plain.start(context.objective, 1.0, round=0)
        w = torch.zeros(1, dtype=torch.float64)
        for _ in range(steps):
            w = step(w, torch.ones_like(w))
        return -float(w)

    def server_update(self, context: Context, server: State, updates: Updates) -> State:
        w = server["model"]
        change = self.aggregate(context, updates, "model", w) - w
        steps = self.aggregate(context, updates, "steps", server["steps"])  # τ_eff
        change[: context.counted.get("model", len(w))] *= steps
        return {"model": w + change, "steps": steps}
