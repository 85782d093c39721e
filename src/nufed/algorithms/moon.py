"""MOON: features are drawn to the global model's, away from the agent's last (Li et al., 2021).

With z(x; y) the inputs of the last layer, w the received model and v the agent's model at the end
of its last round, each local step descends on

    f_i(y) + μ·mean over the batch of ℓ(x),
    ℓ = −log( exp(s_w/T) / (exp(s_w/T) + exp(s_v/T)) ) = log(1 + exp((s_v − s_w)/T)),
    s_w = cos(z(x; y), z(x; w)),   s_v = cos(z(x; y), z(x; v)).

The server averages as in FedAvg. The agent sends y and keeps it as its next v; it takes effect once
the server has accepted the update. In an agent's first round there is no v: v = w then, where ℓ is
log 2 for every y, and the round is FedAvg's. So it is for μ = 0; both skip the term. y is in
training mode, with the dropout of the batch; w and v are in evaluation mode and have no gradient.
The personal model is the global one, fine-tuned by plain steps without the term; a newcomer does
the same. The optimiser drives the steps of y. A local step costs two predictions beside its
gradient; only gradients are counted. What travels, and so what the server sees of an agent, is what
travels in FedAvg; v never leaves the agent.

z are the features of the model that the user gives. The paper inserts a projection head (two
layers) before the last layer: put it into the model. The authors' code has no v in round 1 either;
later it takes the random initial network as v of agents that never took part. It may keep several
past models as further negatives, here it is one as in the paper, and weights agents by samples
(``averaging = "samples"``).

Known mistakes elsewhere: v replaced by the received model whenever parameters are set, so that s_v
= s_w and the term has no effect ([FL4Health #108](https://github.com/VectorInstitute/FL4Health/pull/108),
corrected there); exp(s/T) taken before the quotient, which overflows in float32 for T below 1/88
(PFLlib). The tests also reject: w and v exchanged; v never updated, or the w of the last round;
outputs in place of features; T missing; the sum over the batch; a v for an agent that never took
part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import AgentContext, AgentResult, Cost, Notes, State
from nufed.objective import AnyObjective, Batch, Objective
from nufed.objective.objective import features_of, grad_with_features
from nufed.settings import Search, setting


@dataclass(frozen=True)
class MOON(LocalTraining):
    """MOON: features are drawn to the global model's, away from the agent's last (Li et al., 2021).

    Args:
        weight: μ, the weight of the contrastive term.
        temperature: T.
        others: as for :class:`LocalTraining`.
    """

    weight: float = setting(
        1.0, "μ, weight of the contrastive term", least=0, search=Search(0.1, 10.0)
    )
    temperature: float = setting(0.5, "T, temperature of the contrastive term", above=0)

    notes: ClassVar[Notes] = Notes(
        newcomer="fine-tunes the global model",
        lost_state="its next round has no contrastive term",
        optimized="the local steps",
        averaging="samples",
    )
    combines: ClassVar[None] = None  # features are of one model at a time

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        return {"previous": received["model"]}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        w, v, objective = received["model"], state["previous"], context.objective.base

        def gradient(y: Tensor, batch: Batch) -> Tensor:
            return self.contrastive_gradient(objective, y, batch, w, v)

        contrasts = self.weight > 0 and not torch.equal(w, v)
        y = self.descend(context, w, gradient if contrasts else None)
        return AgentResult({"model": y}, {"previous": y}, Cost(self.steps_per_round(context)))

    def contrastive_gradient(
        self, objective: Objective, y: Tensor, batch: Batch, w: Tensor, v: Tensor
    ) -> Tensor:
        """∇ of f_i(y) + μ·ℓ on a batch."""
        z_w, z_v = (features_of(objective, each, batch.inputs) for each in (w, v))

        def term(z: Tensor) -> Tensor:
            return self.weight * self.contrastive_loss(z, z_w, z_v)

        return grad_with_features(objective, y, batch, term)

    def contrastive_loss(self, z: Tensor, z_w: Tensor, z_v: Tensor) -> Tensor:
        """The mean of ℓ over the batch, one row of features per sample."""
        s_w, s_v = (F.cosine_similarity(z.flatten(1), other.flatten(1)) for other in (z_w, z_v))
        return F.softplus((s_v - s_w) / self.temperature).mean()
