"""Epsilon, by dp-accounting: the privacy loss of rounds with noisy updates, per site.

Two federations are neighbours if one site's data is replaced by any other. Its change, of norm at
most C, then moves by up to 2C; the noise on every update has standard deviation z·C.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from nufed.errors import InputError, require

# Rényi orders; above them the accountant loses digits to cancellation and understates epsilon
ORDERS = [1 + i / 10 for i in range(1, 100)] + list(range(11, 33))
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
    Rényi bound for cohorts sampled without replacement (Wang, Balle & Kasiviswanathan 2019,
    theorem 27). Dropouts leave less noise in the sum; the drop-out rate is assumed to be the same
    outside the cohort, so the sampling rate among responsive sites is cohort / agents. Dividing by
    the number of updates is post-processing: it does not depend on data.
    """
    composed = _composed(sum(n * _mu_squared(noise, r.accepted) for r, n in rounds.items()), delta)
    if not any(map(_is_amplified, rounds)):
        return composed
    divergences = sum(n * _divergences(noise, r) for r, n in rounds.items())
    amplified, _ = _accounting().rdp.compute_epsilon(ORDERS, divergences, delta)
    return min(composed, float(amplified))


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


def _is_amplified(round: Round) -> bool:
    """Whether to use amplification by sampling: from half of the agents on it gains little, and
    the accountant loses digits."""
    return 2 * round.cohort < round.agents


@cache
def _divergences(noise: float, round: Round) -> Any:
    """The Rényi divergences of a round's model, one for each of ORDERS."""
    dp = _accounting()
    # the Rényi accountant, unlike others there, takes noise relative to the replace-one sensitivity
    event = dp.GaussianDpEvent(_mu_squared(noise, round.accepted) ** -0.5)
    if _is_amplified(round):
        event = dp.SampledWithoutReplacementDpEvent(round.agents, round.cohort, event)
    accountant = dp.rdp.RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE)
    return accountant.compose(event).rdp


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
