"""Which method to start with: the rule of ``nufed advise CONFIG``, and what it rests on.

A pilot (:mod:`nufed.lab.pilot`) trains one method of each kind for a short time, and scores them
on validation samples. Then

0. training alone takes part only if the others were trained for a quarter of the configured rounds:
   it gains nothing by more of them;
1. *near* are methods whose mean score is behind the pilot's best by at most one standard error of
   the paired difference, over agents (of few agents over their samples);
2. of these the recommendation has the smallest sum of its rank in the pilot and its mean rank on
   the problems of the board (docs/board.md).

The first version of the rule took the rank on the board alone in 2, and had no 0: both were changed
once, after a check on three problems in which it recommended a method of rank 34 of 38.

``board_check.json`` holds those ranks, and how often the rule was right on problems of the board
whose own results it had not seen. It is written by ``python -m board --advice`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import Field

from nufed.lab.analysis.places import bootstrap, over_samples
from nufed.lab.runs.json_files import Count, Number, Record, Whole, or_nan
from nufed.theory import small_spread_gap

LOCAL = "local"
DISJOINT: dict[str, Any] = {"local_steps": 1, "outer_samples": "disjoint"}
KINDS: Mapping[str, Mapping[str, Any]] = {  # named as on the board; one for each kind of method
    LOCAL: {},  # no federation
    "fedavg-5": {"algorithm": "fedavg", "local_steps": 5},  # one model, fine-tuned
    "per-fedavg": {"algorithm": "per_fedavg", **DISJOINT},  # trained for ν steps of fine-tuning
    "gmeta-3": {"algorithm": "gmeta", "adapt_steps": 3, **DISJOINT},
    "gmeta-5": {"algorithm": "gmeta", "adapt_steps": 5, **DISJOINT},
    "fedrep": {"algorithm": "fedrep", "local_steps": 5},  # a shared body, heads of one's own
    "ditto": {"algorithm": "ditto", "local_steps": 5},  # a model of one's own beside the shared one
    "ifca": {"algorithm": "ifca", "local_steps": 5},  # several shared models
}
NU = {"fedavg-5": 0, "per-fedavg": 1, "gmeta-3": 3, "gmeta-5": 5}
CONFIDENT = 1.96  # standard errors
ENOUGH_ROUNDS = 0.25  # of those configured, for a comparison with training alone
NO_GAIN = 0.03  # a relative gain that the theory's page calls none
Standing: TypeAlias = Mapping[str, Mapping[str, float]]
"""By problem of the board: the rank of each of :data:`KINDS` among them."""


class Tried(Record):
    """A method in the pilot, with the best of the step sizes tried.

    ``adapt_lr`` is the step size of fine-tuning chosen on validation samples, 0: no step;
    ``shared`` the mean score of the global model, null if there is none. ``resampled`` are
    deviations on resamples of an agent's samples, where agents are few.
    """

    method: str
    settings: dict[str, Any] = Field(default={})
    factor: float = 1.0
    adapt_lr: float = 0.0
    steps: Whole = 0
    score: float | None
    shared: float | None = None
    scores: list[float] = Field(default=[])
    resampled: list[list[float]] = Field(default=[])
    failure: str | None = None


class Heterogeneity(Record):
    """How agents differ at a model: γ_G and γ_H, and the largest curvature of each agent.

    ``gradient`` is the norm of the agents' mean gradient.
    """

    model: Literal["initial", "fedavg"]
    agents: Count
    gradient: Number
    gamma_g: Number
    gamma_h: Number
    curvatures: list[float]

    @property
    def mean_curvature(self) -> float:
        return float(np.mean(self.curvatures))


class Halved(Record):
    """What the recommended method loses with half as many agents in training, or samples."""

    what: Literal["agents", "samples"]
    difference: Number
    noise: Number


class PilotRecord(Record):
    """What a pilot measured.

    ``agents`` take part in training by the configuration, ``trained`` in the pilot; ``scored`` are
    newcomers if ``newcomers``. ``samples`` are the fewest, median and most training samples of an
    agent; ``steps`` those of fine-tuning (k). ``left_out``: what was not done, and why.
    """

    format: Literal[1] = 1
    source: str
    seed: Whole
    minutes: float
    seconds: float
    measure: str
    higher_is_better: bool
    agents: Count
    trained: Count
    scored: Count
    newcomers: bool
    samples: tuple[Count, float, Count]
    classes: Whole
    parameters: Count
    steps: Whole
    cohort: Count
    rounds: Count
    rounds_configured: Count
    smooth: bool
    heterogeneity: list[Heterogeneity]
    tried: list[Tried]
    halved: list[Halved] = Field(default=[])
    left_out: list[str] = Field(default=[])

    @property
    def sign(self) -> int:
        return 1 if self.higher_is_better else -1

    @property
    def ran(self) -> dict[str, Tried]:
        """Methods that have a score, the best first."""
        scored = [t for t in self.tried if t.failure is None and math.isfinite(or_nan(t.score))]
        scored.sort(key=lambda t: -self.sign * or_nan(t.score))
        return {tried.method: tried for tried in scored}

    @property
    def comparable(self) -> list[str]:
        """Methods that may be recommended, the best first: training alone if rounds suffice."""
        enough = self.rounds >= ENOUGH_ROUNDS * self.rounds_configured
        return [name for name in self.ran if name != LOCAL or enough or len(self.ran) == 1]


class Checked(Record):
    """The rule on a problem of the board, with the ranks of the other problems.

    ``recommended`` has this ``rank`` among all methods of the board, ``tied``: it can't be told
    apart from the best there; ``possible`` says so of any of :data:`KINDS`, ``fedavg`` of FedAvg
    with fine-tuning, ``usual`` of the method with the best mean rank on the other problems.
    """

    problem: str
    recommended: str
    rank: Count
    of: Count
    best: str
    tied: bool
    possible: bool
    fedavg: bool
    usual: bool
    usual_method: str


class BoardCheck(Record):
    """Ranks on the board, and how often the rule was right with one problem held out at a time.

    ``seconds``: of the longest of the pilots, in CPU time.
    """

    standing: dict[str, dict[str, float]]
    seconds: float = 0.0
    checked: list[Checked]

    @property
    def sentence(self) -> str:
        """What the check found, in one sentence."""
        if not self.checked:
            return "This rule has not been checked against the board yet."
        right, possible, fedavg, usual = (
            sum(getattr(each, key) for each in self.checked)
            for key in ("tied", "possible", "fedavg", "usual")
        )
        rank, of = (np.median([getattr(c, key) for c in self.checked]) for key in ("rank", "of"))
        return (
            f"With one problem of the board held out at a time, and pilots of {self.seconds:.0f} s "
            f"or less, the recommended method was within noise of the best of all methods on "
            f"{right} of {len(self.checked)} problems (at best one of those tried was on "
            f"{possible}; median rank {rank:g} of {of:g}); always FedAvg with fine-tuning: "
            f"{fedavg}, always the best one on the other problems: {usual}."
        )


class PilotAdvice(Record):
    """What ``nufed advise CONFIG`` writes: the recommendation, its reasons and the pilot.

    ``settings`` are those to start with; ``behind`` has the difference and standard error of the
    other methods, positive if they are worse; ``text`` is what was printed.
    """

    format: Literal[1] = 1
    method: str
    settings: dict[str, Any]
    near: list[str]
    alike: list[str]
    behind: dict[str, tuple[float, float]]
    board: BoardCheck
    text: list[str]
    pilot: PilotRecord


@cache
def board_check() -> BoardCheck:
    """The check that nufed ships with."""
    text = (files("nufed.lab.analysis") / "board_check.json").read_text("utf-8")
    return BoardCheck.model_validate_json(text)


@dataclass(frozen=True)
class Gap:
    """The mean paired difference of a method to another one, positive if it is worse, and its
    standard error."""

    mean: float
    noise: float

    @property
    def sure(self) -> bool:
        """Whether 0 is outside of the 95 % interval."""
        return abs(self.mean) > CONFIDENT * self.noise


@dataclass(frozen=True)
class Recommendation:
    """The method to start with.

    Args:
        method: its name among :data:`KINDS`.
        near: all within one standard error of the pilot's best.
        behind: the gaps of the other methods to ``method``, positive if they are worse.
        nu_gain: what the best ν > 1 gains over ν = 1, positive if it is better; None: unknown.
        most: the largest relative gain of ν = 3 over ν = 1 that γ_H allows (docs/when_nu_pays.md);
            None where the theory's expansion does not apply.
        agents_needed: scored agents that would tell the runner-up apart, at this gap.
    """

    method: str
    near: tuple[str, ...]
    behind: Mapping[str, Gap]
    nu_gain: Gap | None
    most: float | None
    agents_needed: int | None

    @property
    def alike(self) -> list[str]:
        """Methods that the pilot can't tell apart from the recommended one, at 95 %."""
        return [name for name, gap in self.behind.items() if not gap.sure]


def recommend(pilot: PilotRecord, standing: Standing) -> Recommendation:
    """The rule of this module."""
    ran, comparable = pilot.ran, pilot.comparable
    best = comparable[0]
    near = [name for name in comparable if name == best or _as_good(pilot, name, best)]
    method = min(near, key=lambda name: comparable.index(name) + mean_rank(standing, name))
    behind = {name: gap(pilot, name, method) for name in ran if name != method}
    return Recommendation(
        method,
        tuple(near),
        behind,
        _nu_gain(pilot),
        _largest_gain(pilot),
        _agents_needed(pilot, behind),
    )


def mean_rank(standing: Standing, name: str) -> float:
    """The mean rank of a method over problems of the board; without any all are equal."""
    ranks = [ranks.get(name, float(len(KINDS))) for ranks in standing.values()]
    return float(np.mean(ranks)) if ranks else 0.0


def gap(pilot: PilotRecord, worse: str, better: str) -> Gap:
    """How far a method is behind another one, with the standard error of the difference."""
    pair = [pilot.ran[better], pilot.ran[worse]]
    values = [[np.array(each.scores)] for each in pair]
    if all(each.resampled for each in pair):
        drawn = over_samples(values, [[np.array(each.resampled)] for each in pair])
    else:
        drawn = bootstrap(values)
    noise = (drawn[:, 0] - drawn[:, 1]).std()
    difference = values[0][0].mean() - values[1][0].mean()
    return Gap(float(pilot.sign * difference), float(noise))


def _as_good(pilot: PilotRecord, name: str, best: str) -> bool:
    to_best = gap(pilot, name, best)
    return to_best.mean <= to_best.noise


def _nu_gain(pilot: PilotRecord) -> Gap | None:
    """What the better one of ν = 3 and 5 gains over ν = 1."""
    more = next((name for name in pilot.ran if NU.get(name, 0) > 1), None)
    if more is None or "per-fedavg" not in pilot.ran:
        return None
    return gap(pilot, "per-fedavg", more)


def _largest_gain(pilot: PilotRecord) -> float | None:
    """The largest relative gain of ν = 3 over ν = 1 by the theory, for optima that are tied to
    curvature entirely, at the step size that ν = 1 chose."""
    if not pilot.heterogeneity or "per-fedavg" not in pilot.ran:
        return None
    at, rate = pilot.heterogeneity[-1], or_nan(pilot.ran["per-fedavg"].adapt_lr)
    if not rate * max(at.curvatures) < 1:
        return None
    terms = at.mean_curvature, or_nan(at.gamma_h), 1.0
    gaps = [small_spread_gap(*terms, nu=nu, steps=pilot.steps, alpha=rate) for nu in (1, 3)]
    return 1 - gaps[1] / gaps[0]


def _agents_needed(pilot: PilotRecord, behind: Mapping[str, Gap]) -> int | None:
    """Scored agents with which the nearest unsure method would be apart at this difference."""
    unsure = [each for each in behind.values() if not each.sure and each.mean > 0]
    if not unsure or any(tried.resampled for tried in pilot.ran.values()):
        return None
    nearest = min(unsure, key=lambda each: each.noise / each.mean)
    return math.ceil(pilot.scored * (CONFIDENT * nearest.noise / nearest.mean) ** 2)
