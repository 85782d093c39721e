"""The schema of the JSON files that only the run of a federation has."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from nufed.runs.records import Record, Whole

Epsilon = Annotated[float, Field(ge=0, allow_inf_nan=True)]


class Epsilons(Record):
    released: Epsilon
    server: Epsilon


class Budget(Record):
    released: Epsilon | None
    server: Epsilon | None


class Updates(Record):
    """The most noisy updates of any site."""

    charged: Whole
    claimed: Whole


class HoldsFor(Record):
    released: str
    server: str


class PrivacyRecord(Record):
    """``privacy.json``: the privacy spent by a federation with noisy updates."""

    clip: float
    noise: float
    delta: float
    epsilon: Epsilons
    updates: Updates | None = None
    budget: Budget
    holds_for: HoldsFor
    agents: Whole
    cohort: Whole
    rounds: Whole
    scores_sent: bool


class FederationRecord(Record):
    """``federation.json``: the run's identifier at the sites, the digest of its configuration in
    checkpoints, and the seed of secret cohorts."""

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    configuration: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    cohort_seed: Annotated[int, Field(ge=0, lt=2**128)] | None = None


class Exclusion(Record):
    round: Whole
    reason: str


class ExclusionsRecord(Record):
    """``excluded.json``: agents that are not sent requests any more, by their numbers."""

    agents: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Exclusion]
