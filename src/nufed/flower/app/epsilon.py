"""Epsilon, by dp-accounting: the privacy loss of rounds with noisy updates, per site.

Two federations are neighbours if one site's data is replaced by any other. Its change, of norm at
most C, then moves by up to 2C; the noise on every update has standard deviation z·C.

With secret cohorts of a fixed size, m of n sites, a round releases x + N(0, 1) with a sensitivity
of μ (proofs in docs/accounting.md). Whichever data one site's are replaced by, in either direction,
its hockey-stick divergence of order e^ℓ is at most

    δ(ℓ) = γ·G(1 + (e^ℓ - 1) / γ) for ℓ ≥ 0,  δ(ℓ) = 1 - e^ℓ + e^ℓ·δ(-ℓ) for ℓ < 0,

with γ = m/n and G that of N(μ, 1) against N(0, 1). It is the divergence of one pair of
distributions, so rounds compose as if each released a draw from it. Each numerical step rounds up:
δ is interpolated between points of a grid, and truncated mass counts as an infinite loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from nufed.errors import InputError, require

POINTS_PER_SCALE = 16  # grid points per γ·μ, the scale of a round's loss
MAX_POINTS = 2**12  # grid points between 0 and the largest loss
MAX_SHIFT = 9.0  # a round's loss is finite for noise of up to this many standard deviations
MAX_LOSS = 700.0  # of a round: above it, e^loss exceeds the range of double precision
MAX_EPSILON = 500.0  # for the same reason
ROUNDING = 1e-12  # upper bound, per round, on the floating-point error of the composed δ


def sampled_epsilon(rounds: Mapping[tuple[float, float], int], delta: float) -> float:
    """An upper bound on epsilon for rounds counted by (μ, γ); infinite above MAX_EPSILON.

    >>> round(sampled_epsilon({(0.2, 0.1): 100}, delta=1e-5), 1)
    0.8
    """
    remaining = delta - ROUNDING * sum(rounds.values())
    if remaining <= 0 or max(_largest_loss(*round) for round in rounds) > MAX_LOSS:
        return math.inf
    step = max(_step(*round) for round in rounds)
    losses = (_composed_loss(*round, step, times) for round, times in rounds.items())
    loss = reduce(lambda first, second: first.compose(second), losses)
    if loss.get_delta_for_epsilon(0.0) <= remaining:
        return 0.0
    if loss.get_delta_for_epsilon(MAX_EPSILON) > remaining:
        return math.inf
    return float(loss.get_epsilon_for_delta(remaining))


def divergence(mu: float, rate: float, losses: Any) -> Any:
    """δ(ℓ) of the module's docstring, for an array of ℓ."""
    from scipy.special import log_ndtr, ndtr  # type: ignore[import-untyped]

    size = np.abs(losses)
    log_order = size + np.log1p((rate - 1) * np.expm1(-size) / rate)  # ln(1 + (e^|ℓ| - 1) / γ)
    upper, lower = mu / 2 - log_order / mu, -mu / 2 - log_order / mu
    delta = rate * np.maximum(0, ndtr(upper) - np.exp(log_order + log_ndtr(lower)))
    return np.where(losses < 0, -np.expm1(losses) + np.exp(losses) * delta, delta)


def _largest_loss(mu: float, rate: float) -> float:
    """ln(1 + γ·(e^x - 1)) with x the Gaussian's loss at MAX_SHIFT."""
    loss = mu**2 / 2 + MAX_SHIFT * mu
    return loss + math.log(rate - (rate - 1) * math.exp(-loss))


def _step(mu: float, rate: float) -> float:
    """The grid's step: a power of two, so that a coarser grid is part of a finer one."""
    finest = max(rate * mu / POINTS_PER_SCALE, _largest_loss(mu, rate) / MAX_POINTS)
    return float(2.0 ** math.floor(math.log2(finest)))


@lru_cache(maxsize=64)
def _composed_loss(mu: float, rate: float, step: float, times: int) -> Any:
    """The discretised privacy loss distribution of equal rounds, by connecting the dots
    (Doroshenko et al. 2022)."""
    from dp_accounting.pld import pld_pmf  # type: ignore[import-untyped]

    last = math.ceil(_largest_loss(mu, rate) / step)
    deltas = divergence(mu, rate, np.arange(-last, last + 1) * step)
    once = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -last, last, deltas)
    return once.to_dense_pmf().self_compose(times)


EXCESS_PROBABILITY = 1e-3  # that some site is picked more often than planned


@dataclass(frozen=True)
class Round:
    """Sizes: ``accepted`` updates of a ``cohort`` drawn from ``agents``."""

    agents: int
    cohort: int
    accepted: int

    def __post_init__(self) -> None:
        sizes = (self.accepted, self.cohort, self.agents)
        ok = all(map(is_count, sizes)) and 1 <= self.accepted <= self.cohort <= self.agents
        require(
            ok,
            "accepted, cohort, agents",
            sizes,
            "must be whole numbers, 1 or more, in ascending order",
        )


def released_epsilon(noise: float, rounds: Mapping[Round, int], delta: float) -> float:
    """The epsilon of the released models of these rounds, with secret cohorts.

    The minimum of two upper bounds: exact composition as if a site were in every cohort, and the
    composed privacy loss of cohorts sampled without replacement. Dropouts leave less noise in the
    sum; the drop-out rate is assumed to be the same outside the cohort, so the sampling rate among
    responsive sites is cohort / agents. Dividing by the number of updates is post-processing: it
    does not depend on data.
    """
    taken = {round: times for round, times in rounds.items() if times}
    composed = _composed(sum(n * _mu_squared(noise, r.accepted) for r, n in taken.items()), delta)
    if all(round.cohort == round.agents for round in taken):
        return composed
    by_loss: Counter[tuple[float, float]] = Counter()
    for round, times in taken.items():
        by_loss[_mu_squared(noise, round.accepted) ** 0.5, round.cohort / round.agents] += times
    return min(composed, sampled_epsilon(by_loss, delta))


def server_epsilon(noise: float, releases: int, delta: float) -> float:
    """The epsilon of a site against the server after ``releases`` noisy updates."""
    return _composed(releases * _mu_squared(noise, 1), delta)


def max_releases(agents: int, cohort: int, rounds: int) -> int:
    """Upper bound on the times any site is picked; fails with probability at most 10⁻³."""
    _accounting()
    from scipy.stats import binom  # type: ignore[import-untyped]  # comes with the accountant

    return int(binom.isf(EXCESS_PROBABILITY / agents, rounds, cohort / agents))


def _mu_squared(noise: float, accepted: int) -> float:
    """μ² = (sensitivity / standard deviation)² of a sum of a updates: (2C)² / (a·z²·C²)."""
    return 4 / (accepted * noise**2)


def _composed(mu_squared: float, delta: float) -> float:
    """The exact epsilon of composed Gaussian mechanisms whose μ² add up to ``mu_squared``."""
    if mu_squared == 0:
        return 0.0
    return float(_accounting().get_epsilon_gaussian(mu_squared**-0.5, delta))


def _accounting() -> Any:
    try:
        import dp_accounting  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError(
            'epsilon can\'t be computed without dp-accounting: pip install "nufed[privacy]"'
        ) from error
    return dp_accounting


def is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
