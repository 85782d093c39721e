"""kNN-Per: the global model interpolated with a local kNN classifier (Marfoq et al., 2022).

The global model w is trained as by FedAvg. Agent m stores the features z_i = z(x_i; w) (the inputs
of the last layer) and labels y_i of its training samples, and predicts

    p(y | x) = λ·p_kNN(y | x) + (1 − λ)·p_w(y | x),
    p_kNN(y | x) ∝ Σ_{i among the k nearest to x} 1[y_i = y]·exp(−d_i/σ),   d_i = ‖z(x; w) − z_i‖₂.

**Probabilities** are interpolated, and their logarithms are the outputs, so that cross-entropy,
softmax and argmax apply to them. A probability of exactly 0 (λ = 1, no neighbour of that class) is
replaced by the smallest positive number, so that every output is finite. Weights are normalised as
a softmax of −d/σ, which does not underflow for distant neighbours. If k exceeds the number of
samples, all are used. λ is one number for all agents; the paper tunes one per agent on held-out
data.

Only w is exchanged; agents keep nothing between rounds. The datastore (features, labels) is part of
the personal model, is computed with it, from the training part alone, and never leaves the agent;
in a file of a personal model it is training data in another form (``personal_data``). A newcomer
computes its datastore; nothing is trained. Further fine-tuning takes plain steps of w, after each
of which the datastore is recomputed; by default results are reported without it. The optimiser
drives the steps of w.

Known mistakes elsewhere: the authors' code uses weights exp(−d²/(dim·scale)), with d² because faiss
returns squared distances, where the paper has exp(−d); unguarded, distant neighbours give 0/0.
Their flag to interpolate logits, and FL-bench always, mix kNN's probabilities with the model's
*logits*, so that the model outweighs the neighbours for any λ. FL-bench also stores features before
the activation that precedes the last layer, compares the datastore's capacity with the number of
batches instead of samples, and where weights underflow gives every class the kNN probability 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nufed.algorithms.local_training import LocalTraining, labelled_features
from nufed.algorithms.protocol import AgentContext, Notes, Personal, State
from nufed.objective import AnyObjective, Inputs
from nufed.objective.objective import features_of
from nufed.settings import Search, setting


@dataclass(frozen=True)
class KNNPer(LocalTraining):
    """kNN-Per: the global model mixed with k nearest neighbours (Marfoq et al., 2022).

    Args:
        knn_weight: λ, the weight of the nearest neighbours.
        neighbours: k.
        distance_scale: σ, the scale of distances; 1 is the paper's exp(−d).
        others: as for :class:`LocalTraining`, of the global model.
    """

    knn_weight: float = setting(
        0.5, "λ, weight of the nearest neighbours", least=0, most=1, search=Search(0.0, 1.0)
    )
    neighbours: int = setting(10, "k, nearest neighbours", least=1)
    distance_scale: float = setting(1.0, "σ, scale of distances", above=0)

    notes: ClassVar[Notes] = Notes(
        newcomer="stores features and labels of its samples; nothing is trained",
        optimized="the local steps",
        shown_steps=0,
        personal_data="features and labels of the agent's training samples",
        averaging="samples",
    )
    combines: ClassVar[None] = None  # datastores differ in size

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        return Personal(self.with_datastore(context, received["model"]))

    def with_datastore(self, context: AgentContext, w: Tensor) -> State:
        """A model with the features and labels of the agent's training part."""
        features, labels = labelled_features(context, w, "knn_per")
        return {"model": w, "features": features, "labels": labels}

    def fine_tune(
        self, context: AgentContext, received: State, personal: State, steps: int, scale: float = 1
    ) -> Iterator[State]:
        yield personal
        _, *models = super().fine_tune(context, received, personal, steps, scale)
        yield from (self.with_datastore(context, tensors["model"]) for tensors in models)

    def predict(self, objective: AnyObjective, personal: State, inputs: Inputs) -> Tensor:
        w, stored, labels = personal["model"], personal["features"], personal["labels"]
        by_model = objective.predict(w, inputs).log_softmax(dim=1)
        features = features_of(objective.base, w, inputs).flatten(1)
        by_neighbours = self.neighbour_shares(features, stored, labels, by_model.shape[1])
        knn, model = by_model.new_tensor([self.knn_weight, 1 - self.knn_weight]).log()
        mixed = torch.logaddexp(knn + by_neighbours.log(), model + by_model)
        return mixed.masked_fill(mixed == -torch.inf, math.log(torch.finfo(mixed.dtype).tiny))

    def neighbour_shares(
        self, features: Tensor, stored: Tensor, labels: Tensor, classes: int
    ) -> Tensor:
        """p_kNN, one row per sample."""
        # not by matrix products: small distances would be lost to cancellation
        distances = torch.cdist(features, stored, compute_mode="donot_use_mm_for_euclid_dist")
        near, places = distances.topk(min(self.neighbours, len(stored)), dim=1, largest=False)
        weights = (-near / self.distance_scale).softmax(dim=1)
        of_class = F.one_hot(labels, classes).to(features)[places]
        return (weights.unsqueeze(2) * of_class).sum(dim=1)
