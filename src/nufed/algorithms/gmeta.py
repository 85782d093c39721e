"""Generalized meta federated averaging (Algorithm 1) with the local updates 2, 3 and 4.

The agents look for one model w that is good after ν fine-tuning steps on each agent's own data:

    min_w  (1/N) Σ_i f_i(w^i_ν),   w^i_0 = w,   w^i_{l+1} = w^i_l − α∇f_i(w^i_l).

ν = 0 is FedAvg and ν = 1 is Per-FedAvg.

Beyond the paper, the step size may be learned along with the model, one per parameter tensor
(Meta-SGD, Li et al. 2017, which has one per coordinate and so sends twice as much):

    min_{w, θ}  (1/N) Σ_i f_i(w^i_ν),   w^i_{l+1} = w^i_l − a⊙∇f_i(w^i_l),   a = E exp(θ),

with E the expansion of one number per tensor to a vector like w. The logarithms θ are what is
trained, sent and combined: no rate turns negative whatever anyone sends, the mean of θ is the
geometric mean of rates, and a step changes a rate in proportion to itself, which suits rates of any
size. Each local update changes both, from the same batches:

    w ← w − β·d₀,   θ ← θ − rates_lr·Eᵀ(a⊙∂f(w_ν)/∂a),   ∂f(w_ν)/∂a = −Σ_l ∇f(w_l)⊙d_{l+1}.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nufed.adapt import Rate, descend, per_coordinate, per_tensor, trajectory
from nufed.aggregate import Aggregation, Mean
from nufed.algorithm import BatchSource, ClientResult, ClientUpdate, Cost, Draw, State
from nufed.errors import require
from nufed.metagrad import (
    Curvature,
    Exact,
    FirstOrder,
    MetaBatch,
    meta_gradient,
    meta_gradient_with_rates,
)
from nufed.objective import AnyObjective


@dataclass(frozen=True)
class GMeta:
    """Generalized meta federated averaging (Algorithm 1 of the paper), for any ν.

    Args:
        adapt_steps: ν, the fine-tuning steps that the model is trained for.
        adapt_lr: α, their step size; a number or a vector like w.
        meta_lr: β, the step size of a local update.
        local_steps: τ, local updates per round.
        batch_size: D, samples per batch.
        curvature: how the Hessian enters: ``Exact()``, ``FirstOrder()`` or ``HessianFree()``.
        aggregation: how the server combines models: ``Mean()`` (the paper; ``Mean("samples")``
            weighs by them), ``ClippedMean()``, ``Median()`` or ``TrimmedMean(share)``; learned
            rates are combined in the same way, by themselves.
        rates_lr: the step size with which step sizes are learned, from ``adapt_lr`` on; 0: they are
            not. It moves logarithms: on the digits data 0.1 is stable, and 0.5 diverges.
    """

    adapt_steps: int = 1
    adapt_lr: Rate = 0.01
    meta_lr: float = 0.001
    local_steps: int = 4
    batch_size: int = 40
    curvature: Curvature = Exact()
    aggregation: Aggregation = Mean()
    rates_lr: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("adapt_steps", 0), ("local_steps", 1), ("batch_size", 1)):
            value = getattr(self, name)
            ok = isinstance(value, int) and value >= least
            require(ok, name, value, f"must be a whole number, {least} or more")
        for name in ("adapt_lr", "meta_lr", "rates_lr"):
            value = getattr(self, name)
            smallest, largest = (
                (float(value.min()), float(value.max()))
                if isinstance(value, Tensor)
                else (value,) * 2
            )
            ok = smallest >= 0 and largest < float("inf")
            require(ok, name, value, "must be a finite number, 0 or more")
        if self.rates_lr:
            number = not isinstance(self.adapt_lr, Tensor) and self.adapt_lr > 0
            allowed = "where step sizes are learned it must be a number above 0 to start from"
            require(number, "adapt_lr", self.adapt_lr, allowed)
            allowed = "with adapt_steps = 0 there is no step size to learn; set it to 0"
            require(self.adapt_steps > 0, "rates_lr", self.rates_lr, allowed)

    @property
    def receives(self) -> tuple[str, ...]:
        return ("model", "log_rates") if self.rates_lr else ("model",)

    sends = receives

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        if not self.rates_lr:
            return {"model": w}
        rates = w.new_full((len(objective.base.sizes),), float(self.adapt_lr))
        return {"model": w, "log_rates": rates.log()}

    def client_init(self, w: Tensor) -> State:
        return {}

    def client_update(
        self, objective: AnyObjective, received: State, state: State, batches: BatchSource
    ) -> ClientResult:
        vectors = received
        for t in range(self.local_steps):
            vectors = self.local_update(objective, vectors, self.meta_batch(batches, t))
        return ClientResult(vectors, state, self._cost())

    def server_update(self, server: State, updates: Sequence[ClientUpdate]) -> State:
        return {name: self.aggregation.combine(updates, name, server[name]) for name in self.sends}

    def personalize(
        self,
        objective: AnyObjective,
        server: State,
        state: State,
        batches: BatchSource,
        steps: int,
        scale: float = 1.0,
    ) -> Iterator[Tensor]:
        (draw,) = self.personal_draws(steps)
        own = batches.draw(*draw)
        return trajectory(objective, server["model"], own, scale * self.rate(objective, server))

    def rate(self, objective: AnyObjective, vectors: State) -> Rate:
        """The step size of fine-tuning: as given, or as learned so far."""
        if not self.rates_lr:
            return self.adapt_lr
        return per_coordinate(vectors["log_rates"].exp(), objective.base.sizes)

    def local_update(self, objective: AnyObjective, vectors: State, batch: MetaBatch) -> State:
        """The model, and the logarithms of rates if they are learned, after one local update."""
        w, lr = vectors["model"], self.rate(objective, vectors)
        if not self.rates_lr:
            d = meta_gradient(objective, w, batch, lr=lr, curvature=self.curvature)
            return {"model": descend(w, self.meta_lr, d)}
        d, by_rates = meta_gradient_with_rates(objective, w, batch, lr=lr, curvature=self.curvature)
        by_logs = per_tensor(lr * by_rates, objective.base.sizes)
        return {
            "model": descend(w, self.meta_lr, d),
            "log_rates": descend(vectors["log_rates"], self.rates_lr, by_logs),
        }

    def meta_batch(self, batches: BatchSource, t: int) -> MetaBatch:
        """The 2ν+1 independent batches of local update t (ν+1 for first-order)."""
        adapt, (outer,), curvature = (batches.draw(*draw) for draw in self._draws(t))
        return MetaBatch(adapt, outer, curvature)

    @property
    def combines(self) -> Literal["elementwise", "linearly"]:
        vector = self.rates_lr or isinstance(self.adapt_lr, Tensor)
        return "elementwise" if vector else "linearly"

    def update_draws(self) -> list[Draw]:
        return [draw for t in range(self.local_steps) for draw in self._draws(t)]

    def personal_draws(self, steps: int) -> list[Draw]:
        return [Draw("adapt", self.batch_size, steps)]

    def _draws(self, t: int) -> tuple[Draw, Draw, Draw]:
        nu, size = self.adapt_steps, self.batch_size
        products = nu * self.curvature.batches_per_product
        return (
            Draw("adapt", size, nu, t),
            Draw("outer", size, 1, t),
            Draw("curvature", size, products, t),
        )

    def _cost(self) -> Cost:
        """What one call of ``client_update`` evaluates."""
        nu, tau, curvature = self.adapt_steps, self.local_steps, self.curvature
        return Cost(
            gradients=tau * (nu + 1 + nu * curvature.gradients_per_product),
            hvps=tau * nu * curvature.hvps_per_product,
        )


def fedavg(
    *,
    adapt_lr: Rate = 0.01,
    meta_lr: float = 0.001,
    local_steps: int = 4,
    batch_size: int = 40,
    aggregation: Aggregation = Mean(),
) -> GMeta:
    """FedAvg: ν = 0. ``adapt_lr`` matters only when its model is fine-tuned afterwards."""
    return GMeta(0, adapt_lr, meta_lr, local_steps, batch_size, FirstOrder(), aggregation)


def per_fedavg(
    *,
    adapt_lr: Rate = 0.01,
    meta_lr: float = 0.001,
    local_steps: int = 4,
    batch_size: int = 40,
    curvature: Curvature = Exact(),
    aggregation: Aggregation = Mean(),
    rates_lr: float = 0.0,
) -> GMeta:
    """Per-FedAvg: ν = 1."""
    return GMeta(1, adapt_lr, meta_lr, local_steps, batch_size, curvature, aggregation, rates_lr)


gmeta = GMeta
