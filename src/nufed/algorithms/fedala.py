"""FedALA: local training starts from an element-wise mixture of models (Zhang et al., 2023).

With w the received model, θ_i the agent's model after its last round and W one weight in [0, 1] per
coordinate of the last p layers, initially 1,

    θ̂ = θ_i + (w − θ_i) ⊙ W   on the last p layers,   θ̂ = w   below them
    W ← clip(W − η·∇f_i(θ̂) ⊙ (w − θ_i), 0, 1)          on a share s of the samples; θ̂ follows W
    θ_i ← θ̂ after τ steps of θ̂ − β∇f_i(θ̂);              server:  w ← mean of θ_i.

The server holds and broadcasts w; the agent keeps W and θ_i (which it also sent). In an agent's
first round θ_i = w, and there is nothing to mix. In its second W is trained to convergence, that is
until a pass over the samples changes no weight by more than ``tolerance``, for at most
``first_passes`` passes; later for one pass per round. The samples are redrawn in every round. The
personal model is θ̂ for the server's latest w, *before* local training: the paper's local model
Θ̂_i, which the authors' code evaluates. Computing it trains W as the next round would, and that
cost is counted. A newcomer uses w. ``optimizer`` drives the local steps; W takes plain steps.

Known mistakes elsewhere: W and the local model belong to a worker that serves many agents, so that
each agent uses the weights of the agent before it (FL-bench); p counts parameter tensors, so that p
= 1 is a bias alone (the authors' code, PFLlib, FL-bench); the authors' code also mixes at agents
outside the cohort, whose models thus drift without training, takes a contiguous block of samples as
its random share, and calls W converged when the losses of the last batch in ten passes have a
standard deviation below 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import AgentContext, AgentResult, Cost, Notes, Personal, State
from nufed.objective import AnyObjective
from nufed.objective.parts import Part
from nufed.settings import setting


@dataclass(frozen=True, kw_only=True)
class FedALA(LocalTraining):
    """FedALA: agents mix the global model into their own with learned weights (Zhang et al., 2023).

    Args:
        layers: p, the last layers with parameters that are mixed.
        weights_lr: η, the step size of W.
        share: s, the share of the agent's samples on which W is trained.
        first_passes: maximum number of passes over these samples when W is first trained.
        tolerance: the largest change of a weight in a pass at which W counts as converged.
        others: as for :class:`LocalTraining`, of the local model.
    """

    layers: int = setting(1, "p, last layers that are mixed", least=0)
    weights_lr: float = setting(1.0, "η, step size of the mixing weights", least=0)
    share: float = setting(0.8, "s, share of samples for the mixing weights", above=0, most=1)
    first_passes: int = setting(50, "maximum passes when mixing weights are first trained", least=1)
    tolerance: float = setting(1e-4, "change per pass below which they have converged", least=0)

    notes: ClassVar[Notes] = Notes(
        newcomer="uses the global model",
        optimized="local steps",
        shown_steps=0,
        averaging="samples",
    )
    combines: ClassVar[None] = None  # agents need different numbers of passes

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        w = received["model"]
        return {
            "local": w,
            "weights": torch.ones_like(self.upper(objective).take(w)),
            "rounds": w.new_zeros(1),  # that the agent took part in
        }

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        start, weights, cost = self.initialise(context, received["model"], state)
        theta = self.descend(context, start)
        kept = {"local": theta, "weights": weights, "rounds": state["rounds"] + 1}
        return AgentResult({"model": theta}, kept, cost + Cost(self.steps_per_round(context)))

    def initialise(
        self, context: AgentContext, w: Tensor, state: State
    ) -> tuple[Tensor, Tensor, Cost]:
        """θ̂, the weights W that lead to it, and the cost of training them."""
        upper, theta, weights = self.upper(context.objective), state["local"], state["weights"]
        local, difference = upper.take(theta), upper.take(w) - upper.take(theta)
        passes = min(int(state["rounds"]), 2)
        passes = (0, self.first_passes, 1)[passes] if upper.size else 0
        draw, size = context.batches.epoch, self.batch_size
        batches = draw("weights", size, share=self.share) if passes else []
        start, cost = w.clone(), Cost()
        upper.fill(start, local + difference * weights)
        for _ in range(passes):
            before = weights
            for batch in batches:
                g = context.objective.base.grad(start, batch, upper)
                weights = (weights - self.weights_lr * g * difference).clamp(0, 1)
                upper.fill(start, local + difference * weights)
                cost += Cost(1)
            if float((weights - before).abs().max()) <= self.tolerance:
                break
        return start, weights, cost

    def upper(self, objective: AnyObjective) -> Part:
        """The coordinates of the last p layers."""
        return objective.base.part(f"last:{self.layers}")

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        w = received["model"]
        if state is None:
            return Personal({"model": w})
        start, _, cost = self.initialise(context, w, state)
        return Personal({"model": start}, cost)
