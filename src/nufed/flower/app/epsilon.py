"""Epsilon, by dp-accounting: the privacy loss of rounds with noisy updates, per site.

Two federations are neighbours if one site's data is replaced by any other. Its change, of norm at
most C, then moves by up to 2C; the noise on every update has standard deviation z·C.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nufed.errors import InputError, require
from nufed.flower.app.privacy_loss import sampled_epsilon

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
