"""Base class of algorithms whose server holds several models: clusters or components of a mixture.

θ_1 … θ_k are one vector, in this order, so that norms, noise, compression and server optimisers see
the change of all of them. θ_1 starts as the initial model w and the others, tensor by tensor, as

    θ_j = m + √(1 − s²)(w − m) + s·σz,   z standard normal,

with m and σ the mean and standard deviation of the tensor's numbers in w and s = ``spread``. 1
draws them independently of w, as the papers do; a small s keeps them near pretrained weights. A
tensor of equal numbers (σ = 0: zero biases, scales of normalisation) starts equal in all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import State
from nufed.errors import InputError
from nufed.objective import AnyObjective
from nufed.seeding import stream
from nufed.settings import setting


@dataclass(frozen=True, kw_only=True)
class SeveralModels(LocalTraining):
    """An algorithm whose server holds several models.

    Args:
        models: k, how many.
        spread: s, how far they start apart.
        others: as for :class:`LocalTraining`.
    """

    models: int = setting(2, "k, models that the server holds", least=1)
    spread: float = setting(
        1.0, "s, how far models start from the initial one; 1: independent of it", least=0, most=1
    )

    receives: ClassVar[tuple[str, ...]] = ("models",)
    sends: ClassVar[tuple[str, ...]] = ("models",)
    combines: ClassVar[None] = None  # the whole training parts of agents differ in size

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        if self.models > 1 and objective.base.tracks_statistics:
            raise InputError(
                f"models = {self.models}: several models can't track running statistics; use "
                'running_stats = "frozen", or a model with GroupNorm'
            )
        others = [self.varied(objective, w, j) for j in range(1, self.models)]
        return {"models": torch.cat([w, *others])}

    def varied(self, objective: AnyObjective, w: Tensor, j: int) -> Tensor:
        """θ_{j+1} before the first round."""
        rng, s, tensors = stream(0, "several_models", step=j), self.spread, []
        for each in torch.split(w, objective.base.sizes):
            mean, deviation = each.mean(), each.std(unbiased=False)
            noise = torch.as_tensor(rng.normal(size=len(each))).to(each)
            tensors.append(mean + math.sqrt(1 - s**2) * (each - mean) + s * deviation * noise)
        return torch.cat(tensors)

    def split(self, models: Tensor) -> list[Tensor]:
        """θ_1 … θ_k."""
        return list(models.view(self.models, -1))

    def global_model(self, objective: AnyObjective, received: State) -> Tensor | None:
        return received["models"] if self.models == 1 else None
