"""FedPAC: features are aligned over agents, and each combines others' heads (Xu et al., 2023).

With φ the shared body, z = φ(x) the features, h_i the head of agent i, c_k the global prototype of
class k, and of the agent's n training samples p_k the share of class k and μ_k its mean features,

    agent:   M_i = (p_1μ_1, …, p_Cμ_C) and V_i = (mean‖z‖² − ‖M_i‖²)/n    at φ and h_i as received
             τ_h times:  h_i ← h_i − α∇_h f_i(h_i, φ)
             τ times:    φ_i ← φ_i − α∇_φ[f_i(h_i, φ_i) + λ·mean (1/d)‖φ_i(x) − c_y‖²]
             μ_ik, the mean features of class k under φ_i
    server:  φ ← mean of φ_i,   c_k ← mean of μ_ik, weighted by the numbers n_i·p_ik of samples
             h_i ← Σ_j a_ij h_j   with a_i = argmin Σ_j a_j²V_j + ‖M_i − Σ_j a_jM_j‖²
                                  over a_j ≥ 0 with sum 1 and the agents j of the cohort.

a_i trades the variance of few samples against the bias of other classes. Equal agents give 1/r. The
quadratic program is solved by an active set; 1e-9 of its mean diagonal is added to it, so that ties
give equal weights. A class that no agent of a cohort has keeps its prototype; where there is none
yet, the term is left out. λ = 0 without combination is FedRep
to the bit: then heads stay with their agents.

The server holds φ, all c_k, the mean of the last heads and a combined head for each agent heard of.
Everyone receives φ and the prototypes, each agent its head alone. It sends φ_i, h_i, μ_i, p_i, M_i
and V_i, and keeps h_i. The personal model is (φ, combined h_i). A newcomer fits the mean of the
last heads, in τ_h steps. The optimiser drives both loops. A round costs an agent τ_h + τ gradients,
and two passes over its training part for features, which are not counted.
The paper averages φ by samples (``averaging = "samples"``).

Privacy: the server learns each agent's class shares and the mean features of its classes, of which
a class with one sample shows that sample's features. Agents see mixtures of heads; a weight near 1
shows about one other's head. Secure aggregation and [privacy] are refused.

In the authors' code weights below 0.001 are 0, eigenvalues below 0.01 are removed where rounding
made one negative, heads have a step size of their own, and a class without a global prototype is
aligned to the agent's own. Known mistakes elsewhere: the solver of the program aborts the process
([FedPAC #4](https://github.com/JianXu95/FedPAC/issues/4)); in PFLlib prototypes are not weighted by
samples, an agent without a solution gets the head at the place of its number, and weights that were
cut no longer sum to 1. The tests also reject: M without p_k, V not divided by n, heads averaged
uniformly, alignment of a class without a prototype to 0, prototypes taken before training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nufed.algorithms.agent_rows import no_rows, row_of, with_rows
from nufed.algorithms.fedrep import FedRep
from nufed.algorithms.local_training import Gradient, labelled_features
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    Context,
    Cost,
    Personal,
    State,
    Updates,
)
from nufed.objective import AnyObjective, Batch, Objective
from nufed.objective.objective import grad_with_features, linear_head
from nufed.settings import Search, setting


@dataclass(frozen=True, kw_only=True)
class FedPAC(FedRep):
    """FedPAC: features are aligned, and agents combine their heads (Xu et al., 2023).

    Args:
        weight: λ, the weight of alignment.
        combine: whether heads are combined; if not, they stay with their agents.
        others: as for :class:`FedRep`.
    """

    weight: float = setting(
        1.0, "λ, weight of the alignment of features", least=0, search=Search(0.01, 10.0)
    )
    combine: bool = setting(True, "whether agents combine their heads")

    receives: ClassVar[tuple[str, ...]] = ("shared", "prototypes", "known")
    sends: ClassVar[tuple[str, ...]] = (
        "shared", "private", "prototypes", "shares", "moments", "variance",
    )  # fmt: skip
    notes = replace(
        FedRep.notes,
        newcomer="takes head_steps steps from the mean of the last cohort's heads",
        averaging="samples",
    )
    combines: ClassVar[None] = None  # features are of one model at a time

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        head, private = linear_head(objective.base), self.parts(objective)[0].take(w).clone()
        features = w.new_zeros(head.out_features * head.in_features)
        return {
            **super().server_init(objective, w),
            "private": private,
            "prototypes": features,
            "known": w.new_zeros(head.out_features),  # 1 for classes that have a prototype
            "shares": w.new_zeros(head.out_features),
            "moments": features,
            "variance": w.new_zeros(1),
            **no_rows(heads=private),
        }

    def downlink(self, context: Context, server: State, agent: int | None) -> State:
        row = row_of(server, agent)
        return {"private": server["private"] if row is None else server["heads"][row]}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        objective, (private, shared) = context.objective.base, self.parts(context.objective)
        head = received["private"] if self.combine else state["private"]
        w = self.join(objective, received["shared"], head)
        means, shares, variance = self.statistics(context, w)
        w, cost = self.train(context, w, self.aligned(objective, received))
        sent = {
            "shared": shared.keep(w),
            "private": private.keep(w),
            "prototypes": self.statistics(context, w)[0].flatten(),
            "shares": shares,
            "moments": (shares.unsqueeze(1) * means).flatten(),
            "variance": variance,
        }
        return AgentResult(sent, {"private": private.keep(w)}, cost)

    def statistics(self, context: AgentContext, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """μ_k of every class, 0 for those without samples; p; V."""
        z, labels = labelled_features(context, w, "fedpac")
        z, classes = z.to(w), linear_head(context.objective.base).out_features
        of_class = F.one_hot(labels, classes).to(w)
        counts = of_class.sum(dim=0)
        means, shares = of_class.T @ z / counts.clamp(min=1).unsqueeze(1), counts / len(z)
        spread = z.square().sum(dim=1).mean() - (shares.unsqueeze(1) * means).square().sum()
        return means, shares, (spread / len(z)).clamp(min=0).reshape(1)

    def aligned(self, objective: Objective, received: State) -> Gradient | None:
        """∇ of f_i + λ·(the distance to prototypes); None where there is nothing to align to."""
        known = received["known"] > 0
        if not self.weight or not known.any():
            return None
        prototypes = received["prototypes"].view(len(known), -1)

        def gradient(w: Tensor, batch: Batch) -> Tensor:
            y = batch.targets.to(w.device)

            def distance(z: Tensor) -> Tensor:
                far = (z.flatten(1) - prototypes[y]).square().mean(dim=1)
                return self.weight * (far * known[y]).mean()

            return grad_with_features(objective, w, batch, distance)

        return gradient

    def server_update(self, context: Context, server: State, updates: Updates) -> State:
        shared, private = (
            self.aggregate(context, updates, n, server[n]) for n in ("shared", "private")
        )
        counts = torch.stack([u.samples * u.vectors["shares"].clamp(min=0) for u in updates])
        means = torch.stack([u.vectors["prototypes"].view(counts.shape[1], -1) for u in updates])
        total = counts.sum(dim=0)
        mean = (counts.unsqueeze(2) * means).sum(dim=0) / total.clamp(min=1e-9).unsqueeze(1)
        old = server["prototypes"].view_as(mean)
        prototypes = torch.where(total.unsqueeze(1) > 0, mean, old).flatten()
        known = server["known"].maximum((total > 0).to(total))
        after = {**server, "shared": shared, "private": private}
        after |= {"prototypes": prototypes, "known": known}
        return {**after, **with_rows(after, self.combined(updates))} if self.combine else after

    def combined(self, updates: Updates) -> dict[int, State]:
        """Each agent's combination of the cohort's heads."""
        heads, moments = (
            torch.stack([u.vectors[name] for u in updates]) for name in ("private", "moments")
        )
        variances = torch.cat([u.vectors["variance"] for u in updates]).double().clamp(min=0)
        rows: dict[int, State] = {}
        for place, update in enumerate(updates):
            gaps = (moments - moments[place]).double()
            weights = simplex_minimum((gaps @ gaps.T + torch.diag(variances)).cpu())
            rows[update.agent] = {"heads": weights.to(heads) @ heads}
        return rows

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        if not self.combine:
            return super().personal_model(context, received, state)
        w = self.join(context.objective, received["shared"], received["private"])
        if state is not None:
            return Personal({"model": w})
        private, batches = self.parts(context.objective)[0], list(self.newcomer_batches(context))
        w = self.descend(context, w, part=private, batches=batches)
        return Personal({"model": w}, Cost(len(batches)))


def simplex_minimum(q: Tensor) -> Tensor:
    """The a ≥ 0 with sum 1 that minimises aᵀQa, for a symmetric positive semidefinite Q.

    By an active set: the minimum over the support without the bound, cut where a weight would be
    negative, until no coordinate outside has a smaller derivative. Ties go to equal weights.

    >>> simplex_minimum(torch.diag(torch.tensor([1.0, 1.0, 2.0]))).round(decimals=6).tolist()
    [0.4, 0.4, 0.2]
    """
    size = float(q.diagonal().mean())
    q = q.double() + 1e-9 * (size or 1.0) * torch.eye(len(q), dtype=torch.float64)
    a, support = q.new_full((len(q),), 1 / len(q)), list(range(len(q)))
    while True:
        x = torch.linalg.solve(q[support][:, support], q.new_ones(len(support)))
        x /= x.sum()
        if bool((x > 0).all()):
            a = torch.zeros_like(a).index_put_((torch.tensor(support),), x)
            slopes = q @ a
            steepest = int(slopes.argmin())
            if steepest in support or slopes[steepest] >= (a @ slopes) - 1e-13 * size:
                return a
            support.append(steepest)
            continue
        now = a[support]
        step = (now / (now - x))[x <= 0].min()
        a[support] = now + step * (x - now)
        support = [j for j in support if a[j] > 1e-15]
