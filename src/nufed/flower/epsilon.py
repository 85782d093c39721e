"""Epsilon, by dp-accounting: how much rounds with noisy updates say about one site's data.

Two federations are neighbours if one site's data is replaced by any other. Its change, no longer
than C, then moves by up to 2C; the noise on every update has standard deviation z·C.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from nufed.errors import InputError, require

# of Rényi divergences; beyond them the accountant's differences lose digits, and it says too little
ORDERS = [1 + i / 10 for i in range(1, 100)] + list(range(11, 33))
RARE = 1e-3  # the chance that some site is asked more often than is expected


@dataclass(frozen=True)
class Round:
    """``accepted`` updates of a ``cohort`` that was drawn from ``agents``, all of them numbers."""

    agents: int
    cohort: int
    accepted: int

    def __post_init__(self) -> None:
        sizes = (self.accepted, self.cohort, self.agents)
        ok = all(map(is_count, sizes)) and 1 <= self.accepted <= self.cohort <= self.agents
        require(ok, "accepted, cohort, agents", sizes, "must be whole numbers, 1 or more, rising")


def released_epsilon(noise: float, rounds: Mapping[Round, int], delta: float) -> float:
    """The epsilon of the models of these rounds, for people who don't know the cohorts.

    Two bounds hold, and the lower one counts: exact composition as if a site were in every cohort,
    and the Rényi bound for cohorts drawn without replacement (Wang, Balle & Kasiviswanathan 2019,
    theorem 27). Sites that did not answer leave less noise in the sum, and are taken to be as
    frequent among those that were not asked: then a share cohort / agents of those that would have
    answered is in the sum. Dividing by their number says no more: it does not depend on data.
    """
    known = _composed(sum(n * _shift(noise, r.accepted) for r, n in rounds.items()), delta)
    if not any(map(_is_hidden, rounds)):
        return known
    divergences = sum(n * _divergences(noise, r) for r, n in rounds.items())
    hidden, _ = _accounting().rdp.compute_epsilon(ORDERS, divergences, delta)
    return min(known, float(hidden))


def server_epsilon(noise: float, releases: int, delta: float) -> float:
    """The epsilon of a site that sent so many noisy updates, against the server."""
    return _composed(releases * _shift(noise, 1), delta)


def most_releases(agents: int, cohort: int, rounds: int) -> int:
    """How often a site is asked at most, but for a chance of one in a thousand."""
    _accounting()
    from scipy.stats import binom  # type: ignore[import-untyped]  # comes with the accountant

    return int(binom.isf(RARE / agents, rounds, cohort / agents))


def _shift(noise: float, accepted: int) -> float:
    """(sensitivity / standard deviation)² of the sum of so many updates: (2C)² / (a·z²·C²)."""
    return 4 / (accepted * noise**2)


def _composed(shift: float, delta: float) -> float:
    """The exact epsilon of Gaussian mechanisms whose squared shifts add up to ``shift``."""
    if shift == 0:
        return 0.0
    return float(_accounting().get_epsilon_gaussian(shift**-0.5, delta))


def _is_hidden(round: Round) -> bool:
    """Whether sampling counts: from half of the agents on it brings little, and digits are lost."""
    return 2 * round.cohort < round.agents


@cache
def _divergences(noise: float, round: Round) -> Any:
    """The Rényi divergences of a round's model, one for each of ORDERS."""
    dp = _accounting()
    # the Rényi accountant, unlike others there, takes noise relative to how far a replacement moves
    event = dp.GaussianDpEvent(_shift(noise, round.accepted) ** -0.5)
    if _is_hidden(round):
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


def is_above_0(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
