"""FedOpt: the server's optimiser, composable with every algorithm (Reddi et al., 2021).

An algorithm's ``server_update`` gives the server's next model; its difference Δ from the previous
model is the optimiser's descent direction (−Δ is the pseudo-gradient):

    none                w ← w + Δ
    FedAvgM (Hsu et al., 2019)   m ← β₁m + Δ,               w ← w + ηm
    FedAdagrad          m ← β₁m + (1 − β₁)Δ,  v ← v + Δ²,   w ← w + ηm/(√v + τ)
    FedYogi             …,   v ← v − (1 − β₂)Δ²·sign(v − Δ²)
    FedAdam             …,   v ← β₂v + (1 − β₂)Δ²

with initial m = 0 and v = τ², without bias correction. Only the model is optimised: control
variates, learned rates and other vectors of the server are what the algorithm returned. m and v
stay at the server.

Known mistakes elsewhere: v from m² instead of Δ² (FedMLLM, after OpenFedLLM); Adam's bias
correction, which the paper's Algorithm 2 lacks (Flower's FedAdam since 2024; fluke as an option),
and initial v = 0 (fluke); Δ instead of m in the step (Flower's FedAdam and FedYogi at first). The
tests also reject: Δ with the wrong sign, τ inside the root, Yogi's sign flipped, Adam in place of
Yogi, an optimiser that acts on control variates or learned rates, m lost between rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nufed.errors import InputError
from nufed.objective import Objective
from nufed.settings import Search, check_settings, setting

MOMENTUM, VARIANCE = OPTIMIZER_STATE = "optimizer_momentum", "optimizer_variance"


@dataclass(frozen=True)
class Plain:
    """No optimiser: the model is that of the algorithm's ``server_update``."""

    def initial(self, w: Tensor) -> dict[str, Tensor]:
        """The optimiser's part of the server's state before the first round."""
        return {}

    def step(
        self, before: Tensor, after: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The next model and state, from the model before and after ``server_update``."""
        return after, state


@dataclass(frozen=True)
class AvgM(Plain):
    """FedAvgM: server momentum, m ← β₁m + Δ, w ← w + ηm (Hsu et al., 2019).

    Args:
        optimizer_lr: η.
        optimizer_momentum: β₁ (their β).
    """

    optimizer_lr: float = setting(
        1.0, "η, step size of the server's optimiser", above=0, search=Search(0.03, 3.0)
    )
    optimizer_momentum: float = setting(0.9, "β₁, momentum of the server", least=0, below=1)

    def __post_init__(self) -> None:
        check_settings(self)

    def initial(self, w: Tensor) -> dict[str, Tensor]:
        return {MOMENTUM: torch.zeros_like(w)}

    def step(
        self, before: Tensor, after: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        m = (self.optimizer_momentum * state[MOMENTUM]).add_(after - before)
        return (self.optimizer_lr * m).add_(before), {MOMENTUM: m}


@dataclass(frozen=True)
class Adagrad(Plain):
    """FedAdagrad: v ← v + Δ² (Reddi et al., 2021).

    Args:
        optimizer_lr: η.
        optimizer_momentum: β₁; the paper uses 0.
        optimizer_tau: τ, the degree of adaptivity; v starts at τ².
    """

    optimizer_lr: float = setting(
        0.1, "η, step size of the server's optimiser", above=0, search=Search(1e-3, 1.0)
    )
    optimizer_momentum: float = setting(0.0, "β₁, momentum of the server", least=0, below=1)
    optimizer_tau: float = setting(1e-3, "τ, adaptivity of the server", above=0)

    def __post_init__(self) -> None:
        check_settings(self)

    def initial(self, w: Tensor) -> dict[str, Tensor]:
        return {MOMENTUM: torch.zeros_like(w), VARIANCE: torch.full_like(w, self.optimizer_tau**2)}

    def step(
        self, before: Tensor, after: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        delta, beta = after - before, self.optimizer_momentum
        m = (beta * state[MOMENTUM]).add_((1 - beta) * delta)
        v = self.variance(state[VARIANCE], delta.square_())
        w = (self.optimizer_lr * m).div_(v.sqrt().add_(self.optimizer_tau)).add_(before)
        return w, {MOMENTUM: m, VARIANCE: v}

    def variance(self, v: Tensor, squares: Tensor) -> Tensor:
        """The next v from this round's Δ²."""
        return v + squares


@dataclass(frozen=True)
class Adam(Adagrad):
    """FedAdam: v ← β₂v + (1 − β₂)Δ² (Reddi et al., 2021).

    Args:
        optimizer_lr: η.
        optimizer_momentum: β₁.
        optimizer_tau: τ, the degree of adaptivity; v starts at τ².
        optimizer_beta2: β₂.
    """

    optimizer_lr: float = setting(
        0.01, "η, step size of the server's optimiser", above=0, search=Search(1e-4, 0.3)
    )
    optimizer_momentum: float = setting(0.9, "β₁, momentum of the server", least=0, below=1)
    optimizer_beta2: float = setting(0.99, "β₂, decay of the server's v", least=0, below=1)

    def variance(self, v: Tensor, squares: Tensor) -> Tensor:
        return (self.optimizer_beta2 * v).add_((1 - self.optimizer_beta2) * squares)


@dataclass(frozen=True)
class Yogi(Adam):
    """FedYogi: v ← v − (1 − β₂)Δ²·sign(v − Δ²) (Reddi et al., 2021); settings as for FedAdam."""

    def variance(self, v: Tensor, squares: Tensor) -> Tensor:
        return v - (1 - self.optimizer_beta2) * squares * torch.sign(v - squares)


def check_statistics(algorithm: Any, objective: Objective) -> None:
    """Refuse a server that steps beyond the mean of tracked running statistics."""
    optimizer, lr = algorithm.server_optimizer, getattr(algorithm, "server_lr", 1.0)
    if not objective.tracks_statistics or (optimizer == Plain() and lr <= 1):
        return
    given, allowed = (
        (f"server_lr = {lr:g}", "server_lr of at most 1")
        if optimizer == Plain()
        else (
            f"server_optimizer = {type(optimizer).__name__.lower()}",
            'server_optimizer = "none"',
        )
    )
    raise InputError(
        f"{given}: the server would step beyond the mean of running statistics, whose variances "
        f'may become negative; use {allowed}, running_stats = "frozen", or a model with GroupNorm'
    )


SERVER_OPTIMIZERS: dict[str, type[Plain]] = {
    "none": Plain,
    "avgm": AvgM,
    "adagrad": Adagrad,
    "adam": Adam,
    "yogi": Yogi,
}
