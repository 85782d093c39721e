"""Which model training for ν steps finds on quadratics, and what it is worth after k steps.

Agent i has f_i(w) = ½λ_i(w − x_i)² along one eigenvector that the agents' Hessians share; losses of
several eigenvectors add up. docs/when_nu_pays.md has statements, proofs and matrices. In short, a
training is a weight p(λ) for each agent; its model is the weighted mean of optima

    w_p = Σ_i p(λ_i)x_i / Σ_i p(λ_i),

and k steps of size α make the loss the mean of ½q(λ_i)(w − x_i)² with q(λ) = λ(1 − αλ)^{2k}; its
minimum is w_q, the model of ν = k exact steps. With moments weighted by q and r = p/q,

    loss(w_p)/loss(w_q) = 1 + (E_p x − E_q x)²/Var_q x = 1 + Var_q(r)/(E_q r)²·corr_q(r, x)².
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nufed.theory.constants import need


@dataclass(frozen=True)
class Weighting:
    """How a training weights an agent's distance from its optimum, by the agent's curvature λ.

    With p(λ) = λ(1 − αλ)^{2ν} (exact; Hessian-free on quadratics too) or λ(1 − αλ)^ν
    (first-order), τ local updates of size β with all agents in every round weigh by

        (1 − (1 − βp)^τ)/(βτ)    → p as β → 0, and = p for τ = 1.

    Args:
        steps: ν; 0 is FedAvg, whose weight is (1 − (1 − βλ)^τ)/(βτ).
        alpha: α of training.
        update: how curvature enters the meta-gradient.
        local_steps: τ.
        beta: β; 0: the limit.

    >>> Weighting(3, 0.5).weight(1.0)
    0.015625
    >>> Weighting(3, 0.5, "first_order").weight(1.0)
    0.125
    >>> Weighting(0, local_steps=2, beta=0.5).weight(1.0)
    0.75
    """

    steps: int
    alpha: float = 0.0
    update: Literal["exact", "first_order"] = "exact"
    local_steps: int = 1
    beta: float = 0.0

    def __post_init__(self) -> None:
        need(self.steps >= 0, "steps", self.steps, "must be 0 or more")
        need(self.local_steps >= 1, "local_steps", self.local_steps, "must be 1 or more")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            need(value >= 0 and math.isfinite(value), name, value, "must be a number, 0 or more")

    def weight(self, curvature: float) -> float:
        """The weight of an agent with this curvature."""
        power = self.steps * (2 if self.update == "exact" else 1)
        p = curvature * (1 - self.alpha * curvature) ** power
        if not self.beta or self.local_steps == 1:
            return p
        return (1 - (1 - self.beta * p) ** self.local_steps) / (self.beta * self.local_steps)


@dataclass(frozen=True)
class Direction:
    """Curvatures λ_i > 0 and optima x_i of agents along a common eigenvector."""

    curvatures: Sequence[float]
    optima: Sequence[float]

    def __post_init__(self) -> None:
        agents = len(self.curvatures)
        need(agents > 0, "curvatures", self.curvatures, "must hold at least one agent")
        need(len(self.optima) == agents, "optima", self.optima, f"must hold {agents} numbers")
        need(min(self.curvatures) > 0, "curvatures", min(self.curvatures), "must be above 0")

    def stationary(self, weighting: Weighting) -> float:
        """w_p, where training for ν steps ends: the weighted mean of optima.

        >>> Direction([1.0, 3.0], [0.0, 1.0]).stationary(Weighting(0))
        0.75
        """
        weights = self._weights(weighting)
        return _dot(weights, self.optima) / math.fsum(weights)

    def loss(self, w: float, steps: int, alpha: float) -> float:
        """The mean loss after ``steps`` (k) fine-tuning steps of size ``alpha`` from w."""
        left = Weighting(steps, alpha)
        terms = zip(self.curvatures, self.optima, strict=True)
        return math.fsum(left.weight(c) * (w - x) ** 2 for c, x in terms) / (2 * len(self.optima))

    def effective_agents(self, weighting: Weighting) -> float:
        """(Σp)²/Σp²: how many equally weighted agents average noise in optima as well."""
        weights = self._weights(weighting)
        return math.fsum(weights) ** 2 / _dot(weights, weights)

    def _weights(self, weighting: Weighting) -> list[float]:
        weights = [weighting.weight(curvature) for curvature in self.curvatures]
        need(sum(weights) > 0, "weights", sum(weights), "must be above 0 in sum; lower alpha")
        return weights

    def gap(self, weighting: Weighting, steps: int, alpha: float) -> float:
        """loss(w_p)/loss(w_q) ≥ 1 after k = ``steps``: against training for k steps, exact.

        >>> two = Direction([1.0, 0.1], [0.0, 1.0])
        >>> round(two.gap(Weighting(1, 0.5), steps=3, alpha=0.5), 3)
        3.165
        """
        q = self._weights(Weighting(steps, alpha))
        ours, best = self.stationary(weighting), self.stationary(Weighting(steps, alpha))
        spread = _dot(q, [(x - best) ** 2 for x in self.optima]) / math.fsum(q)
        if spread > 0:
            return 1 + (ours - best) ** 2 / spread
        return 1.0 if ours == best else math.inf

    def factors(self, weighting: Weighting, steps: int, alpha: float) -> tuple[float, float]:
        """(χ², ϱ²), with gap = 1 + χ²ϱ²: spread of the ratio of weights, correlation with optima.

        >>> two = Direction([1.0, 0.1], [0.0, 1.0])
        >>> [round(x, 3) for x in two.factors(Weighting(1, 0.5), steps=3, alpha=0.5)]
        [2.165, 1.0]
        """
        p, q = (self._weights(each) for each in (weighting, Weighting(steps, alpha)))
        ratios = [a / b * math.fsum(q) / math.fsum(p) for a, b in zip(p, q, strict=True)]
        spread = _covariance(q, ratios, ratios)
        both = spread * _covariance(q, self.optima, self.optima)
        return spread, _covariance(q, ratios, self.optima) ** 2 / both if both > 0 else 0.0


def largest_gap(flattest: float, steepest: float, nu: int, steps: int, alpha: float) -> float:
    """The largest gap of ν against k = ``steps`` for curvatures in a range, over all optima.

    cosh²((k − ν)·ln((1 − αλ_min)/(1 − αλ_max))), for αλ_max < 1; two types of agents reach it.
    """
    need(0 <= flattest <= steepest, "flattest", flattest, f"must be 0 … steepest = {steepest}")
    need(alpha * steepest < 1, "alpha", alpha, f"must be below 1/steepest = {1 / steepest:.3g}")
    apart = math.log((1 - alpha * flattest) / (1 - alpha * steepest))
    return math.cosh((steps - nu) * apart) ** 2


def small_spread_gap(
    smoothness: float, gamma_h: float, correlation: float, nu: int, steps: int, alpha: float
) -> float:
    """The gap to second order in γ_H: 1 + (2α(k − ν)γ_Hϱ/(1 − αλ̄))², with λ̄ = ``smoothness``."""
    return 1 + (2 * alpha * (steps - nu) * gamma_h * correlation / (1 - alpha * smoothness)) ** 2


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _covariance(weights: Sequence[float], a: Sequence[float], b: Sequence[float]) -> float:
    total = math.fsum(weights)
    mean_a, mean_b = _dot(weights, a) / total, _dot(weights, b) / total
    terms = zip(weights, a, b, strict=True)
    return math.fsum(w * (x - mean_a) * (y - mean_b) for w, x, y in terms) / total
