"""APFL: a personal model that mixes a local and the global one (Deng et al., 2020).

The global model w is trained as by FedAvg. Every agent keeps a model v of its own, which starts
from the initial model, and a weight α. In a round, from w_i = w, for every batch

    v̄ = αv + (1 − α)w_i
    v ← v − η·α∇f_i(v̄),   w_i ← w_i − η∇f_i(w_i)             (α∇f_i(v̄) is ∂f_i(v̄)/∂v)

with both gradients at the values before the step, and once per round, on the first batch,

    α ← clip(α − η_α⟨∇f_i(v̄), v − w_i⟩, 0, 1)                  (the product is ∂f_i(v̄)/∂α),

which is used from the second step on. The paper learns α at every communication round, with η_α =
η; η_α = 0 fixes it.

The server holds and broadcasts w; an agent keeps v and α and sends w_i. The personal model is αv +
(1 − α)w with the w that the agent receives then, not its own w_i: the mixture for which the first
step of a round learns α. A newcomer trains v from w for one round's steps, with w fixed and α at
its initial value. The optimiser drives the steps of w and of v; α takes plain steps.

The authors' code differs from the paper, which is followed: it mixes the outputs of two models
instead of their parameters, updates w_i before it takes the gradient of v, and adds 0.02·α to the
gradient of α.

Known mistakes elsewhere: v trained on f(v) and then overwritten by v̄, so that every round mixes
again, and α learned from α∇f(v) + (1 − α)∇f(w_i) with that 0.02·α (PFLlib); a second step of one
optimiser without clearing gradients, which moves w_i twice per batch, so that w is not FedAvg's
(FL-bench). The tests also reject: no factor α in the step of v; the wrong sign of v − w_i; α not
clipped, or learned in every step; ∇f at w_i or v instead of v̄; a personal model with w_i instead
of w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import AgentContext, AgentResult, Cost, Draw, Notes, Personal, State
from nufed.objective import AnyObjective, Batch
from nufed.settings import Search, setting


@dataclass(frozen=True)
class APFL(LocalTraining):
    """APFL: every agent mixes a model of its own with the global one (Deng et al., 2020).

    Args:
        mixing: the initial α, the weight of v in the personal model.
        mixing_lr: η_α, the step size of α; 0: it is fixed.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η, of w and of v.
    """

    mixing: float = setting(
        0.5,
        "initial α, weight of the agent's own model",
        least=0,
        most=1,
        search=Search(0.0, 1.0),
    )
    mixing_lr: float = setting(0.1, "η_α, step size of α; 0: fixed", least=0)

    notes: ClassVar[Notes] = Notes(
        newcomer="trains v from the global model for one round's steps",
        optimized="steps of w and of v",
        shown_steps=0,
    )

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        alpha = received["model"].new_full((1,), self.mixing)
        return {"personal": objective.base.initial(), "mixing": alpha}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        w, v, alpha = received["model"], state["personal"], state["mixing"]
        grad = context.objective.grad
        step_w, step_v = self.start_steps(context), self.start_steps(context)
        for t, batch in enumerate(self.local_batches(context)):
            g, learned = grad(mix(alpha, v, w), batch), alpha
            if t == 0:
                by_alpha = (g * (v - w)).sum(dim=-1, keepdim=True)
                learned = (alpha - self.mixing_lr * by_alpha).clamp(0, 1)
            v = step_v(v, alpha * g, batch)
            w = step_w(w, grad(w, batch), batch)
            alpha = learned
        cost = Cost(2 * self.steps_per_round(context))
        return AgentResult({"model": w}, {"personal": v, "mixing": alpha}, cost)

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        w = received["model"]
        if state is not None:
            return Personal({"model": mix(state["mixing"], state["personal"], w)})
        alpha = w.new_full((1,), self.mixing)

        def gradient(v: Tensor, batch: Batch) -> Tensor:  # ∂f(v̄)/∂v with w fixed
            return alpha * context.objective.grad(mix(alpha, v, w), batch)

        v = self.descend(context, w, gradient)
        return Personal({"model": mix(alpha, v, w)}, Cost(self.steps_per_round(context)))

    def personal_draws(self, steps: int) -> list[Draw]:
        return [Draw("adapt", self.batch_size, steps), *self.update_draws()]


def mix(alpha: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """v̄ = αv + (1 − α)w."""
    return torch.lerp(w, v, alpha)
