"""Reptile: the server moves part of the way to the agents' models (Nichol et al., 2018).

Every agent takes τ plain gradient steps from w, and the server moves w towards the mean of the
resulting models (the batched form of the paper's Algorithm 2):

    w̃_i ← w;  τ times:  w̃_i ← w̃_i − η∇f_i(w̃_i),      w ← w + ε·mean(w̃_i − w).

ε = 1 is FedAvg. With τ ≥ 2 the expected step contains the first-order MAML direction besides that
of the joint loss. The server holds and broadcasts w; agents send w̃_i and keep nothing. The
personal model is the global one after fine-tuning; a newcomer does the same. The paper fine-tunes
with the optimiser and step size of training: set ``adapt_lr`` = ``meta_lr`` for that. It also
anneals ε linearly to 0 over training, which is not implemented. The optimiser drives the steps of
w̃_i.

Known mistakes elsewhere: none found in published federated code. The tests reject likely ones: w̃_i
− w used as a gradient, which moves w away from the agents; the sum over agents instead of their
mean; ε·mean(w̃_i), which shrinks w; ε at the agent and again at the server.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import Context, Notes, State, Updates
from nufed.settings import Search, setting


@dataclass(frozen=True)
class Reptile(LocalTraining):
    """Reptile: the server moves part of the way to the agents' models (Nichol et al., 2018).

    Args:
        server_lr: ε, the step size of the server.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η, ``local_steps`` is τ (their k).
    """

    server_lr: float = setting(0.5, "ε, step size of the server", above=0, search=Search(0.03, 1.0))

    kept_loops: ClassVar[tuple[str, ...]] = ("local",)
    notes: ClassVar[Notes] = replace(LocalTraining.notes, newcomer="fine-tunes the global model")
    combines = LocalTraining.combines_linearly

    def server_update(self, context: Context, server: State, updates: Updates) -> State:
        w = server["model"]
        mean = self.aggregate(context, updates, "model", w)
        return {**server, "model": w + self.server_lr * (mean - w)}
