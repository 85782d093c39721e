"""IFCA: agents choose among k models by their loss, and train the chosen one (Ghosh et al., 2020).

    agent i:  ĵ = argmin_j f_i(θ_j) on its whole training part,   θ̃_i: τ local steps from θ_ĵ
    server:   θ_j ← mean of θ̃_i over the agents of the cohort that chose j; unchanged if none did

(the paper's model averaging; its gradient averaging divides by the cohort instead). The first of
several equal losses is chosen. An agent sends all k models, those that it did not choose as it
received them, and its choice as a vector of 0 and 1. With m the mean of what agents send for j and
s the share that chose it, the server computes θ_j + (m − θ_j)/s, which is that mean. So it needs
only sums, and with secure aggregation it does not learn who chose what; without, it sees every
agent's choice, which says what the agent's data are like. An agent sends k times as much as in
FedAvg, of which a codec for changes sends one model. Rules other than the mean are refused: where a
minority chose a model, they would discard it.

Agents keep nothing. The personal model is the one of lowest loss on the agent's training part, for
newcomers too. There is no global model, so that only personal models can be bundled. The cost of a
round is FedAvg's plus k evaluations of the loss on the training part, which are not counted. Noise
of differential privacy is added to choices, too, and s divides by it: with few agents per model
use none. ``optimizer`` drives the local steps; the server's optimiser acts on the change of all
models. Not implemented: layers that clusters share.

Known mistakes elsewhere: no public thread was found. The tests reject: a mean over the cohort
instead of those that chose; a model that nobody chose set to 0; the choice by the largest loss, or
on one batch; all models trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nufed.algorithms.aggregation import Mean
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    Context,
    Cost,
    Notes,
    Personal,
    State,
    Updates,
)
from nufed.algorithms.several_models import SeveralModels
from nufed.errors import require
from nufed.objective import AnyObjective


@dataclass(frozen=True, kw_only=True)
class IFCA(SeveralModels):
    """IFCA: every agent trains the one of k models that suits its data best (Ghosh et al., 2020).

    Args:
        models: k, the number of clusters.
        others: as for :class:`SeveralModels`.
    """

    receives: ClassVar[tuple[str, ...]] = ("models", "choice")  # k zeros: the grid of choices
    sends: ClassVar[tuple[str, ...]] = ("models", "choice")
    notes: ClassVar[Notes] = Notes(
        newcomer="takes the model with the lowest loss on its training samples",
        optimized="the local steps",
        shown_steps=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self.aggregation).__name__.lower()
        allowed = "must be mean: other rules discard a model that few agents chose"
        require(isinstance(self.aggregation, Mean), "aggregation", name, allowed)

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        return {**super().server_init(objective, w), "choice": w.new_zeros(self.models)}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        models = self.split(received["models"])
        chosen = self.choose(context, models)
        models[chosen] = self.descend(context, models[chosen])
        choice = torch.zeros_like(models[0][:1]).repeat(self.models)
        choice[chosen] = 1
        vectors = {"models": torch.cat(models), "choice": choice}
        return AgentResult(vectors, state, Cost(self.steps_per_round(context)))

    def choose(self, context: AgentContext, models: list[Tensor]) -> int:
        """ĵ, the model with the lowest loss on the agent's training part."""
        samples = context.batches.whole()
        losses = torch.stack([context.objective.base.value(w, samples) for w in models])
        return int(losses.nan_to_num(torch.inf).argmin())

    def server_update(self, context: Context, server: State, updates: Updates) -> State:
        sent = {n: self.aggregate(context, updates, n, server[n]) for n in self.sends}
        before, mean = self.split(server["models"]), self.split(sent["models"])
        models = [
            among(w, m, float(share))
            for w, m, share in zip(before, mean, sent["choice"], strict=True)
        ]
        return {**server, "models": torch.cat(models)}

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        models = self.split(received["models"])
        return Personal({"model": models[self.choose(context, models)]})


def among(w: Tensor, mean: Tensor, share: float) -> Tensor:
    """The mean over the share that chose a model, from the mean over all, of whom others sent w."""
    if share <= 0:
        return w
    return mean if share == 1 else w + (mean - w) / share
