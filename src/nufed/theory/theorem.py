"""Theorem 1: the convergence bound as named terms, its step-size condition, and a schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields

from nufed.theory.constants import (
    BatchSizes,
    FalseBoundWarning,
    ProblemConstants,
    TheoryError,
    need,
)
from nufed.theory.lemmas import GradientError, meta_dissimilarity, meta_smoothness


@dataclass(frozen=True)
class Training:
    """The settings of training: step size β, τ local updates, K rounds, m of N agents a round."""

    meta_lr: float
    local_steps: int
    rounds: int
    cohort: int
    agents: int

    def __post_init__(self) -> None:
        ok = math.isfinite(self.meta_lr) and self.meta_lr > 0
        need(ok, "meta_lr", self.meta_lr, "must be a finite number above 0")
        for name in ("local_steps", "rounds", "agents"):
            value = getattr(self, name)
            need(isinstance(value, int) and value >= 1, name, value, "must be 1 or more")
        ok = isinstance(self.cohort, int) and 1 <= self.cohort <= self.agents
        need(ok, "cohort", self.cohort, f"must lie in 1 … {self.agents}, the number of agents")

    @property
    def sampling(self) -> float:
        """κ = (N − m)/(m(N − 1)): the variance of a cohort's mean, relative to one agent's."""
        if self.agents == 1:
            return 0.0
        return (self.agents - self.cohort) / (self.cohort * (self.agents - 1))


@dataclass(frozen=True)
class TheoremTerms:
    """The terms of Theorem 1's right-hand side; ``total`` is their sum."""

    initial_gap: float
    bias: float
    drift_dissimilarity: float
    drift_noise: float
    agent_sampling: float
    gradient_noise: float

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, field.name) for field in fields(self))


def largest_meta_lr(smoothness: float, local_steps: int) -> float:
    """The largest β that Theorem 1 allows: 1/(10τL_F)."""
    return 1 / (10 * local_steps * smoothness)


def convergence_bound(
    training: Training,
    smoothness: float,
    error: GradientError,
    dissimilarity: float,
    initial_gap: float,
) -> TheoremTerms:
    """(1/K)Σ_{k<K} E‖∇F(w_k)‖² ≤ total, for the models w_k the server holds (docs/theory.md).

    Args:
        training: β, τ, K, m, N, with β ≤ 1/(10τL_F).
        smoothness: L_F; error: μ_F and σ_F²; dissimilarity: γ_F.
        initial_gap: F(w_0) − F*, or more.

    With b = βτL_F, the bound is the least over s of
    [(F_0−F*)/(βτK) + (φ + Cs/2)M² + (b/2)(1+ε)(κγ_F² + σ_F²/(τm))] / (A − C/(2s)).
    """
    for name, value in (
        ("initial_gap", initial_gap),
        ("dissimilarity", dissimilarity),
        ("bias", error.bias),
        ("second_moment", error.second_moment),
    ):
        need(math.isfinite(value) and value >= 0, name, value, "must be finite, 0 or more")
    need(smoothness > 0, "smoothness", smoothness, "must be above 0")
    beta, tau, m = training.meta_lr, training.local_steps, training.cohort
    _check_meta_lr(beta, smoothness, tau)
    sigma = math.sqrt(error.second_moment)
    mu = min(error.bias, sigma)  # by Jensen's inequality
    gamma, kappa = dissimilarity, training.sampling

    b = beta * tau * smoothness
    straight = (
        beta * smoothness * (1 + b * math.exp(b) / 2) * math.sqrt((tau - 1) * (2 * tau - 1) / 6)
    )
    jagged = beta * smoothness * (1 + 2 * b * math.exp(b) / 3) * math.sqrt((tau - 1) / 2)
    epsilon = math.sqrt(b * (kappa + 1 / m))
    phi = b / 2 + b / 2 * (1 + 1 / epsilon) * (kappa + 1 / m)
    a = 1 - b / 2 - (1 - b) * straight - phi * straight**2
    c = 1 - b + 2 * phi * straight

    parts = ((1 + straight) * mu, straight * gamma, jagged * sigma)
    off = sum(parts)  # M: bounds the distance of the mean direction from ∇F(w_k), less z‖∇F(w_k)‖
    gap = initial_gap / (beta * tau * training.rounds)
    sampling = b / 2 * (1 + epsilon) * kappa * gamma**2
    noise = b / 2 * (1 + epsilon) * sigma**2 / (tau * m)
    fixed = gap + sampling + noise + phi * off**2
    if off**2 > 0:  # the best s has a closed form
        s = c / (2 * a) * (1 + math.sqrt(1 + 4 * a * fixed / (c * off) ** 2))
        share, per_off = a - c / (2 * s), phi + c * s / 2
    else:
        share, per_off = a, 0.0
    bias, drift_dissimilarity, drift_noise = (per_off * off * part / share for part in parts)
    return TheoremTerms(
        initial_gap=gap / share,
        bias=bias,
        drift_dissimilarity=drift_dissimilarity,
        drift_noise=drift_noise,
        agent_sampling=sampling / share,
        gradient_noise=noise / share,
    )


def printed_bound(
    training: Training,
    smoothness: float,
    error: GradientError,
    dissimilarity: float,
    initial_gap: float,
    constant: float,
) -> TheoremTerms:
    """Theorem 1 as printed, its O(1) given as ``constant``.

    It is about the cohort's average iterates within rounds. No constant makes it true for all
    problems: the sampling of agents lacks a factor τ (docs/theory.md has a counterexample).
    """
    beta, tau = training.meta_lr, training.local_steps
    _check_meta_lr(beta, smoothness, tau)
    if training.sampling > 0 and tau > 1:
        warnings.warn(
            "Theorem 1 as printed is false with some agents a round (docs/theory.md)",
            FalseBoundWarning,
            stacklevel=2,
        )
    step = constant * beta * smoothness
    drift = beta * smoothness * tau * (tau - 1)
    return TheoremTerms(
        initial_gap=4 * initial_gap / (beta * tau * training.rounds),
        bias=constant * error.bias**2,
        drift_dissimilarity=step * drift * dissimilarity**2,
        drift_noise=step * drift * error.second_moment,
        agent_sampling=step * training.sampling * dissimilarity**2,
        gradient_noise=step * error.second_moment,
    )


@dataclass(frozen=True)
class Schedule:
    """Settings for which Theorem 1 guarantees an ε-stationary point, and the terms they balance."""

    training: Training
    batch_size: int
    terms: TheoremTerms


def schedule(
    epsilon: float,
    constants: ProblemConstants,
    alpha: float,
    steps: int,
    *,
    error: Callable[[BatchSizes], GradientError],
    initial_gap: float,
    agents: int,
    cohort: int,
) -> Schedule:
    """τ, K, β and D after the paper's remark, such that (1/K)ΣE‖∇F(w_k)‖² ≤ ε.

    D is doubled until μ_F² takes a quarter of ε, or up to 2⁴⁹; τ = ⌈ε^{−1/2}⌉ with all agents in
    every round and 1 otherwise (the variance of sampling agents grows with τ: more local updates
    then do not help); β is halved from the largest allowed until all but the first term take three
    quarters; K is the smallest that suffices. So K = O(ε^{−3/2}) with all agents and O(ε^{−2}) with
    some. This follows the remark; with batches as large as 1/ε, τ = 1 and a larger β can need fewer
    rounds.

    Args:
        error: μ_F and σ_F² for given batch sizes: ``partial(exact_error, constants, alpha)``.
    """
    need(0 < epsilon < math.inf, "epsilon", epsilon, "must be a finite number above 0")
    smoothness = meta_smoothness(constants, alpha, steps)
    dissimilarity = meta_dissimilarity(constants, alpha, steps)
    tau = max(1, math.ceil(epsilon**-0.5)) if cohort == agents else 1
    size = _smallest_batch(epsilon, error, steps)
    errors = error(BatchSizes.equal(size, steps))

    def terms(beta: float, rounds: int, gap: float = initial_gap) -> TheoremTerms:
        training = Training(beta, tau, rounds, cohort, agents)
        return convergence_bound(training, smoothness, errors, dissimilarity, gap)

    # the limit of infinitely many rounds tends to μ_F² as β falls: stop half-way to ε at most
    target = max(0.75 * epsilon, (errors.bias**2 + epsilon) / 2)
    beta = largest_meta_lr(smoothness, tau)
    while terms(beta, 1, gap=0.0).total > target:
        beta /= 2
    rounds = 1
    while terms(beta, rounds).total > epsilon:
        rounds *= 2
    low = rounds // 2
    while rounds - low > 1:  # the smallest K, by bisection
        middle = (rounds + low) // 2
        low, rounds = (low, middle) if terms(beta, middle).total <= epsilon else (middle, rounds)
    return Schedule(Training(beta, tau, rounds, cohort, agents), size, terms(beta, rounds))


def _smallest_batch(
    epsilon: float, error: Callable[[BatchSizes], GradientError], steps: int
) -> int:
    for size in (1 << power for power in range(50)):
        least = error(BatchSizes.equal(size, steps)).bias ** 2
        if least <= epsilon / 4:
            return size
    if least < 0.9 * epsilon:
        return size
    raise TheoryError(
        f"epsilon = {epsilon:g} can't be guaranteed with any batch size: the bias of this update "
        f"alone takes {least:.3g}; lower alpha, or use exact curvature or a smaller fd_step"
    )


def _check_meta_lr(beta: float, smoothness: float, tau: int) -> None:
    most = largest_meta_lr(smoothness, tau)
    need(
        beta <= most * (1 + 1e-12),
        "meta_lr",
        beta,
        f"Theorem 1 holds up to 1/(10τL_F) = {most:.3g}; lower meta_lr or local_steps",
    )
