"""FedAMP: agents with similar models are drawn together (attentive messages; Huang et al., 2021).

Every agent has a model w_i; the server keeps the last one of each. For the joint objective

    Σ_i F_i(w_i) + λ Σ_{i<j} A(‖w_i − w_j‖²),   A(x) = 1 − exp(−x/σ),   A'(x) = exp(−x/σ)/σ,

a step on the second sum, then a proximal step on the first, alternate:

    server:  u_i = ξ_ii w_i + Σ_{j≠i} ξ_ij w_j   with ξ_ii = 1 − Σ_{j≠i} ξ_ij,
             ξ_ij = α·A'(‖w_i − w_j‖²)
    agent:   w_i ≈ argmin_w F_i(w) + λ/(2α)·‖w − u_i‖²,   by τ steps from u_i.

The factor 2 of the gradient of ‖w_i − w_j‖² is in α, as in the paper's equation (5). With a large α
ξ_ii would be negative: where the ξ_ij exceed 1 together, they are divided by their sum, so that u_i
is always a mean of models. Then ξ_ii = 0, and what is the agent's own is lost in every round: with
α = σ = 1, as elsewhere by default, two close neighbours do that. α is the same in all rounds.
HeurFedAMP, which compares models by their cosine, is not offered.

Agents send w_i and receive u_i alone; the server also keeps the aggregate of the last cohort's
models. An agent that it has not heard of receives that, and a newcomer takes one round's steps from
it. The personal model is w_i. There is no global model, and none to bundle for newcomers. Server
and checkpoints hold one model for each agent heard of; a round's mixtures cost a pass over all of
them for every agent of the cohort, and the agent τ gradients. The optimiser drives these steps.

Privacy: the server sees every agent's own model, which secure aggregation would hide, and is
refused. An agent sees a mixture of others' models; where one neighbour has most of the weight, it
sees about that agent's model. A small σ makes such neighbours likelier.

Known mistakes elsewhere: a proximal term between the model and itself, which is always 0 ([PFLlib
#4](https://github.com/TsingZ0/PFLlib/issues/4)); after its correction the term is computed from
``.data``, which has no gradient, so that it still never acts, and its norm is not squared. PFLlib
also mixes the models of the last cohort only, lets ξ_ii be negative (its defaults give 2 − N for N
equal models), and starts local steps at w_i instead of u_i. That weights are A' and not A is asked
in [PFLlib #15](https://github.com/TsingZ0/PFLlib/issues/15). The tests also reject: A, or distances
that are not squared; ξ_ii = 1; λα in place of λ/α; a term around the agent's last model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nufed.algorithms.agent_rows import no_rows, row_of, with_rows
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
from nufed.meta.fine_tuning import proximal
from nufed.objective import AnyObjective, Batch
from nufed.settings import Search, setting


@dataclass(frozen=True)
class FedAMP(LocalTraining):
    """FedAMP: agents with similar models are drawn together (Huang et al., 2021).

    Args:
        weight: λ, the weight of attraction.
        mixing: α, the step size of the server's mixtures.
        width: σ, the squared distance of models at which attraction fades.
        others: as for :class:`LocalTraining`.
    """

    weight: float = setting(0.01, "λ, weight of attraction", least=0, search=Search(0.001, 1.0))
    mixing: float = setting(
        0.1, "α, step size of the server's mixtures", above=0, search=Search(0.01, 10.0)
    )
    width: float = setting(
        1.0, "σ, squared distance at which attraction fades", above=0, search=Search(0.1, 100.0)
    )

    receives: ClassVar[tuple[str, ...]] = ()
    notes: ClassVar[Notes] = Notes(
        newcomer="takes one round's steps from the mean of the last cohort's models",
        lost_state="nothing: the server has its last model, and sends a mixture with it",
        optimized="the local steps",
        shown_steps=0,
    )

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        counted = torch.tensor([objective.base.counted()], device=w.device)
        return {"model": w, "counted": counted, **no_rows(models=w)}

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        return {"personal": received["model"]}

    def downlink(self, context: Context, server: State, agent: int | None) -> State:
        row = row_of(server, agent)
        if row is None:
            return {"model": server["model"]}
        models, counted = server["models"], int(server["counted"])
        return {"model": self.attention(models[:, :counted], row) @ models}

    def attention(self, models: Tensor, row: int) -> Tensor:
        """ξ_i, of the agent in this row, over all models; statistics do not count."""
        distances = (models - models[row]).square().sum(dim=1)
        weights = self.mixing / self.width * torch.exp(-distances / self.width)
        weights[row] = 0
        weights /= weights.sum().clamp(min=1)
        weights[row] = 1 - weights.sum()
        return weights

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        w = self.proximal_steps(context, received["model"])
        return AgentResult({"model": w}, {"personal": w}, Cost(self.steps_per_round(context)))

    def proximal_steps(self, context: AgentContext, u: Tensor) -> Tensor:
        """w after τ steps from u towards a minimum of F_i(w) + λ/(2α)·‖w − u‖²."""

        def gradient(w: Tensor, batch: Batch) -> Tensor:
            g = context.objective.grad(w, batch)
            return proximal(g, self.weight / self.mixing, w, centre=u)

        return self.descend(context, u, gradient)

    def server_update(self, context: Context, server: State, updates: Updates) -> State:
        mean = self.aggregate(context, updates, "model", server["model"])
        rows = {each.agent: {"models": each.vectors["model"]} for each in updates}
        return {**with_rows(server, rows), "model": mean}

    def global_model(self, objective: AnyObjective, received: State) -> None:
        return None

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        if state is not None:
            return Personal({"model": state["personal"]})
        w = self.proximal_steps(context, received["model"])
        return Personal({"model": w}, Cost(self.steps_per_round(context)))

    def personal_draws(self, steps: int) -> list[Draw]:
        return [Draw("adapt", self.batch_size, steps), *self.update_draws()]
