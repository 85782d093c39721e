"""pFedMe: personal models by Moreau envelopes (Dinh et al., 2020).

The agents minimise the mean of their Moreau envelopes, whose gradient follows from the minimiser:

    F_i(w) = min_θ f_i(θ) + λ/2‖θ − w‖²,   ∇F_i(w) = λ(w − θ̂_i(w)).

In a round, from w_i = w, R iterations, each on one mini-batch:

    θ ← w_i;  K times:  θ ← θ − α(∇f_i(θ) + λ(θ − w_i))
    w_i ← w_i − ηλ(w_i − θ)

and the server sets w ← (1 − β)w + β·mean(w_i), where the theory assumes β ≥ 1.

The server holds and broadcasts w; an agent sends w_i and keeps θ of its last local iteration, which
is its personal model. A newcomer takes K inner steps from w on one batch. The optimiser drives the
steps of w_i, with λ(w_i − θ) as its gradient; inner steps are plain. The paper does not say where
the inner steps start; here at w_i, the centre of the proximal term, so that θ depends on w_i and
the batch alone. Accelerated inner solvers, which it allows, are not implemented.

The authors' code differs from the paper, which is followed here: its inner gradient has a weight
decay 0.001·θ, inner steps start at the θ of the previous iteration, and all agents train in every
round, although only some are aggregated.

Known mistakes elsewhere: θ is the live list of the model's parameters, which w_i is then copied
into, so that the model evaluated as personal is w_i (the authors' code, see its issue 5; PFLlib,
after it); the model itself as the centre of the proximal term, which is then identically 0 (fluke);
the received or the initial model evaluated as the personal one. The tests also reject: a new batch
for every inner step; λ or η missing from the step of w_i; θ carried over; β at the agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    Context,
    Cost,
    Draw,
    Notes,
    Personal,
    State,
    Updates,
)
from nufed.meta.fine_tuning import descend, proximal
from nufed.objective import AnyObjective, Batch
from nufed.settings import STEP_SIZES, Search, setting


@dataclass(frozen=True)
class PFedMe(LocalTraining):
    """pFedMe: personal models by Moreau envelopes around the global one (Dinh et al., 2020).

    Args:
        weight: λ, the weight of the proximal term.
        inner_lr: α, the step size of inner steps; at most 1/(L + λ) with f_i L-smooth.
        inner_steps: K, inner steps per local iteration.
        server_lr: β, the weight of the agents' mean at the server.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η, ``local_steps`` is R.
    """

    weight: float = setting(
        15.0, "λ, weight of the proximal term", above=0, search=Search(0.1, 100.0)
    )
    meta_lr: float = setting(
        0.01, "η, step size of a local iteration, along λ(w − θ)", least=0, search=STEP_SIZES
    )
    inner_lr: float = setting(0.05, "α, step size of inner steps", above=0, search=STEP_SIZES)
    inner_steps: int = setting(5, "K, inner steps per local iteration", least=1)
    server_lr: float = setting(
        1.0, "β, weight of the agents' mean at the server", above=0, search=Search(0.1, 3.0)
    )

    notes: ClassVar[Notes] = Notes(
        newcomer="takes inner_steps steps of θ from the global model",
        optimized="steps of w_i; inner steps are plain",
        shown_steps=0,
    )

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        return {"personal": objective.base.initial()}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        objective, personal = context.objective, state["personal"]

        def gradient(w: Tensor, batch: Batch) -> Tensor:  # of F_i at w_i
            nonlocal personal
            theta = self.proximal_point(objective, w, batch)
            personal = objective.base.track(theta, batch)
            return self.weight * (w - theta)

        w = self.descend(context, received["model"], gradient)
        cost = Cost(self.steps_per_round(context) * self.inner_steps)
        return AgentResult({"model": w}, {"personal": personal}, cost)

    def proximal_point(self, objective: AnyObjective, w: Tensor, batch: Batch) -> Tensor:
        """θ after K steps from w towards the minimum of f_i(θ) + λ/2‖θ − w‖², on one batch."""
        lr, weight = self.inner_lr, self.weight
        theta = descend(w, lr, objective.grad(w, batch))  # the proximal term is 0 at w
        for _ in range(1, self.inner_steps):
            g = proximal(objective.grad(theta, batch), weight, theta, centre=w)
            theta = descend(theta, lr, g)
        return theta

    def server_update(self, context: Context, server: State, updates: Updates) -> State:
        w, beta = server["model"], self.server_lr
        mean = self.aggregate(context, updates, "model", w)
        return {**server, "model": (1 - beta) * w + beta * mean}

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        if state is not None:
            return Personal({"model": state["personal"]})
        (batch,) = context.batches.draw("personal", self.batch_size)
        theta = self.proximal_point(context.objective, received["model"], batch)
        theta = context.objective.base.track(theta, batch)
        return Personal({"model": theta}, Cost(self.inner_steps))

    def personal_draws(self, steps: int) -> list[Draw]:
        return [Draw("adapt", self.batch_size, steps), Draw("personal", self.batch_size)]
