"""The optimiser of local steps: SGD with momentum, weight decay, clipping and a schedule.

All of it is off by default: the steps are then bit-equal to the paper's w ← w − η∇f(w).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nufed.meta.fine_tuning import Rate, descend
from nufed.objective import AnyBatch, AnyObjective
from nufed.settings import check_settings, setting


@dataclass(frozen=True)
class SGD:
    """SGD as in torch: g ← clip(g) + λw, m ← μm + g, w ← w − η_k·m.

    m starts at 0 in every round. η_k is the step size of round k, with γ = ``schedule_rounds``:

    * ``constant``: η;
    * ``inverse``: η·γ/(γ + k − 1), the 1/k decay of Li et al. (2020);
    * ``cosine``: η·½(1 + cos(π·min(1, (k − 1)/γ))).

    At evaluation, outside of rounds, it is η.

    Args:
        momentum: μ.
        weight_decay: λ.
        clip_norm: the maximum of ‖g‖, to which larger gradients are scaled; 0: no clipping.
        schedule: how the step size depends on the round.
        schedule_rounds: γ.
    """

    momentum: float = setting(0.0, "μ, momentum of local steps", least=0, below=1)
    weight_decay: float = setting(0.0, "λ, weight decay of local steps", least=0)
    clip_norm: float = setting(0.0, "maximum norm of a local gradient; 0: no clipping", least=0)
    schedule: Literal["constant", "inverse", "cosine"] = setting(
        "constant", "how local step sizes depend on the round"
    )
    schedule_rounds: int = setting(
        100, "γ: inverse halves the step size in round γ + 1, cosine ends at 0 there", least=1
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def rate(self, lr: Rate, round: int) -> Rate:
        """η_k in round k = ``round``."""
        if self.schedule == "constant" or round < 1:
            return lr
        share = (round - 1) / self.schedule_rounds
        if self.schedule == "inverse":
            return lr / (1 + share)
        return lr * (0.5 * (1 + math.cos(math.pi * min(1.0, share))))

    def start(self, objective: AnyObjective, lr: Rate, round: int) -> Steps:
        """The optimiser at the start of a loop of steps in a round."""
        return Steps(self, objective, self.rate(lr, round))


class Steps:
    """The optimiser of one loop of local steps; holds the momentum.

    >>> from nufed import Objective
    >>> objective = Objective(torch.nn.Linear(2, 1, bias=False))
    >>> steps = SGD(momentum=0.5, clip_norm=5.0).start(objective, lr=0.1, round=1)
    >>> w = steps(torch.zeros(2), torch.tensor([30.0, 40.0]))
    >>> w, steps(w, torch.zeros(2))
    (tensor([-0.3000, -0.4000]), tensor([-0.4500, -0.6000]))
    """

    def __init__(self, optimizer: SGD, objective: AnyObjective, rate: Rate) -> None:
        self._optimizer, self._objective, self._rate = optimizer, objective, rate
        self._momentum: Tensor | None = None

    def __call__(self, w: Tensor, gradient: Tensor, batch: AnyBatch | None = None) -> Tensor:
        """w after one step; ``batch`` updates running statistics, if the model tracks them."""
        settings, g = self._optimizer, gradient
        if settings.clip_norm:
            norm = self._objective.norm(g)
            g = g * torch.where(
                norm > settings.clip_norm, settings.clip_norm / norm, torch.ones_like(norm)
            )
        if settings.weight_decay:
            g = g + settings.weight_decay * w
        if settings.momentum:
            g = g if self._momentum is None else settings.momentum * self._momentum + g
            self._momentum = g
        after = descend(w, self._rate, g)
        if batch is None:
            return after
        return self._objective.base.track(after, batch, at=w, overwrite=True)
