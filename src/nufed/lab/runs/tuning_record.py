"""The records of ``nufed tune``: ranges, trials and their scores; the schema of ``tune.json``.

::

    config.toml                 the configuration
    search.json                 sealed: what is searched, within which budget; written last at start
    trials/NAME-0007/           a trial of the method NAME
        trial.json              sealed: its settings
        rung-000011.json        sealed: its validation score after 11 rounds, and the work so far
        metrics.jsonl, checkpoint-…, states/    while it may be trained further
    repeats/NAME-0007-seed-1/   the same of a finalist with another seed
    tune.json                   sealed: everything above in one record, and what follows from it
    tuned.toml                  the configuration with the chosen settings
    tune.html, figures/         a page drawn from tune.json
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from nufed.lab.config.schema import BudgetUnit, SamplerName, ScoredAgents
from nufed.lab.runs.json_files import Number, Record, Whole

FACTOR = 3.0  # a step in a logarithmic range
HVP_WORK = 2  # gradients that a Hessian-vector product counts as
DIGITS = 3  # significant digits of values that are tried
WIDER = 10.0  # factor by which a range grows
MAX_WIDER = 1e3  # factor by which it may have grown at each end
DECLARED = "declared"  # origin of the ranges that grow


class Range(Record):
    """What is searched of one setting: numbers from ``low`` to ``high``, or ``choices``.

    ``origin`` says where the range comes from. A value's *position* is 0 at ``low`` and 1 at
    ``high``, on a logarithmic scale if ``log``.
    """

    setting: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    whole: bool = False
    choices: list[Any] = Field(default=[])
    origin: str = DECLARED

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.choices and not (self.low < self.high and (self.low > 0 or not self.log)):
            raise ValueError("low must be below high, and above 0 on a logarithmic scale")
        return self

    def at(self, position: float) -> Any:
        """The value at a position from 0 to 1, rounded to three digits.

        >>> Range(setting="meta_lr", low=0.001, high=1.0, log=True).at(0.5)
        0.0316
        """
        if self.choices:
            return self.choices[min(int(position * len(self.choices)), len(self.choices) - 1)]
        low, high = self._scaled(self.low), self._scaled(self.high)
        value = low + position * (high - low)
        value = math.exp(value) if self.log else value
        rounded = round(value) if self.whole else float(f"{value:.{DIGITS}g}")
        return min(max(rounded, self.low), self.high) if not self.whole else rounded

    def position(self, value: Any) -> float:
        """The inverse of :meth:`at`."""
        if self.choices:
            return (self.choices.index(value) + 0.5) / len(self.choices)
        low, high = self._scaled(self.low), self._scaled(self.high)
        return (self._scaled(value) - low) / (high - low)

    def steps(self) -> float:
        """Its width in factors of 3, or, on a linear scale, in thirds."""
        return math.log(self.high / self.low, FACTOR) if self.log else 3.0

    def grid(self) -> list[Any]:
        """Evenly spaced values, about a factor of 3 (or a third) apart, with both ends."""
        if self.choices:
            return list(self.choices)
        number = max(2, round(self.steps()) + 1)
        return list(dict.fromkeys(self.at(k / (number - 1)) for k in range(number)))

    def contains(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        return isinstance(value, int | float) and self.low <= value <= self.high

    def open_side(self, best: Trial, trials: Sequence[Trial]) -> Literal["lower", "upper"] | None:
        """The end near which the best trial lies, with no trial beyond it that shows a maximum.

        Near is within a factor of 3. If several settings are searched, trials beyond it that failed
        show nothing: another setting may have been the cause.
        """
        value, several = best.settings[self.setting], len(best.settings) > 1
        if not self.log or value <= 0 or len({t.settings[self.setting] for t in trials}) < 3:
            return None
        shown = [t.settings[self.setting] for t in trials if not (several and t.failure)]
        if value * FACTOR >= self.high and not any(other > value for other in shown):
            return "upper"
        if value <= self.low * FACTOR and not any(other < value for other in shown):
            return "lower"
        return None

    def wider(self, side: Literal["lower", "upper"]) -> Range:
        """A copy with one end moved by a factor of 10."""
        if side == "upper":
            return self.model_copy(update={"high": self.high * WIDER})
        low = self.low / WIDER
        return self.model_copy(update={"low": max(1.0, low) if self.whole else low})

    def __str__(self) -> str:
        if self.choices:
            return " or ".join(map(str, self.choices))
        return f"{self.low:g} to {self.high:g}"

    def _scaled(self, value: float) -> float:
        if not self.log:
            return float(value)
        return math.log(value) if value > 0 else -math.inf


class RungScore(Record):
    """A trial's validation score at a rung, and the work of its training so far.

    ``scale`` is that of the step size of fine-tuning, chosen on the same samples.
    ``evaluation_gradients`` and ``evaluation_hvps`` are of this score alone. ``failure`` is why
    there is none; the trial is then over.
    """

    rounds: Whole
    score: Number = math.nan
    loss: Number = math.nan
    scale: float = 1.0
    gradients: Whole = 0
    hvps: Whole = 0
    evaluation_gradients: Whole = 0
    evaluation_hvps: Whole = 0
    failure: str | None = None

    @property
    def work(self) -> int:
        """The work of training, in gradients."""
        return self.gradients + HVP_WORK * self.hvps

    @property
    def evaluation_work(self) -> int:
        return self.evaluation_gradients + HVP_WORK * self.evaluation_hvps

    def rank(self, higher_is_better: bool) -> tuple[float, float]:
        """Greater is better: by score, then by loss; a failed trial ranks worst."""
        score = (self.score or 0.0) if higher_is_better else -(self.score or 0.0)
        loss = -(self.loss or 0.0)
        if self.failure is not None:
            return -math.inf, -math.inf
        return score, loss if math.isfinite(loss) else -math.inf


class AskedTrial(Record):
    """``trial.json``: a method with settings to try. ``batch`` and ``number`` count from 0."""

    number: Whole
    method: str
    batch: Whole
    seed: Whole
    settings: dict[str, Any]


class Trial(AskedTrial):
    """A trial and its scores, one for each rung that it reached."""

    rungs: list[RungScore] = Field(min_length=1)

    @property
    def last(self) -> RungScore:
        return self.rungs[-1]

    @property
    def failure(self) -> str | None:
        return self.last.failure

    def after(self, rounds: int) -> RungScore | None:
        """The score after ``rounds`` rounds; None if it was not trained that long."""
        return next((r for r in self.rungs if r.rounds == rounds and not r.failure), None)


class MethodSearch(Record):
    """What is searched for one method, and the predicted work of one full training of it."""

    ranges: list[Range]
    configured: dict[str, Any]
    work: float
    notes: list[str] = Field(default=[])


class SearchRecord(Record):
    """``search.json``: everything that determines a search.

    ``unit`` is the predicted work of a full training by the cheapest method; a method may spend
    ``budget`` times as much or, per trial, try ``budget`` settings. ``command`` repeats the search.
    From ``format`` 2 on, rungs before the last are scored with the step size of fine-tuning as
    trained, and declared ranges grow.
    """

    format: Literal[1, 2] = 1
    command: str
    config: dict[str, Any]
    data_sha256: str
    splits: dict[str, str]
    measure: str
    higher_is_better: bool
    budget: float
    per: BudgetUnit = "gradient"
    unit: float
    seed: Whole
    repeat_seeds: list[Whole]
    sampler: SamplerName
    agents: ScoredAgents
    rungs: list[Whole] = Field(min_length=1)
    methods: dict[str, MethodSearch]
    software: dict[str, str]

    @property
    def allowed(self) -> float:
        """The work that the search may spend on each method; unbounded if trials are counted."""
        return math.inf if self.per == "trial" else self.budget * self.unit

    @property
    def budget_text(self) -> str:
        """What every method may spend, in words."""
        if self.per == "trial":
            return f"{self.budget:g} trials"
        return f"{self.allowed:,.0f} gradients ({self.budget:g} × {self.unit:,.0f})"

    def ranges(self, method: str, trials: Sequence[Trial]) -> list[Range]:
        """The ranges of a method after these trials of it.

        While the best trial after a batch lies near an end of a declared range, and no trial beyond
        shows a maximum, that end moves by a factor of 10.
        """
        ranges = declared = self.methods[method].ranges
        for batch in sorted({trial.batch for trial in trials}) if self.format > 1 else ():
            so_far = [trial for trial in trials if trial.batch <= batch]
            best = best_trial(so_far, self.higher_is_better)
            if best is not None:
                ranges = [
                    _grown(current, first, best, so_far)
                    for current, first in zip(ranges, declared, strict=True)
                ]
        return ranges


class TuningRecord(Record):
    """``tune.json``: a finished search. ``chosen`` are the numbers of trials, by method.

    A method of which every trial failed is not in ``chosen``.
    """

    search: SearchRecord
    trials: list[Trial]
    repeats: list[Trial]
    chosen: dict[str, Whole]

    def of(self, method: str) -> list[Trial]:
        """The trials of a method, in their order."""
        return [trial for trial in self.trials if trial.method == method]

    def choice(self, method: str) -> Trial:
        """The trial whose settings were chosen for a method."""
        return next(trial for trial in self.trials if trial.number == self.chosen[method])

    def ranges(self, method: str) -> list[Range]:
        """The ranges of a method that its last batch was drawn from."""
        trials = self.of(method)
        last = max((trial.batch for trial in trials), default=0)
        return self.search.ranges(method, [trial for trial in trials if trial.batch < last])

    def used(self, method: str) -> float:
        """The share of the budget that a method spent."""
        if self.search.per == "trial":
            return len(self.of(method)) / self.search.budget
        return self.spent(method) / self.search.allowed

    def spent(self, method: str) -> int:
        """The work of all trials of a method."""
        return sum(trial.last.work for trial in self.of(method))


def best_trial(trials: Sequence[Trial], higher_is_better: bool) -> Trial | None:
    """The best of those that were trained longest; None if all failed."""
    scored = [trial for trial in trials if trial.failure is None]
    rank = {t.number: (t.last.rounds, *t.last.rank(higher_is_better)) for t in scored}
    return max(scored, key=lambda trial: rank[trial.number], default=None)


def _grown(current: Range, declared: Range, best: Trial, trials: Sequence[Trial]) -> Range:
    side = current.open_side(best, trials) if current.origin == DECLARED else None
    if side is None:
        return current
    wider = current.wider(side)
    most = max(wider.high / declared.high, declared.low / wider.low)
    return wider if most <= MAX_WIDER * (1 + 1e-9) else current


def finalists(trials: list[Trial], rounds: int, number: int, higher_is_better: bool) -> list[Trial]:
    """The best fully trained trials, best first; equally good ones in their order."""
    scored = [(trial, trial.after(rounds)) for trial in trials]
    full = [(trial, score) for trial, score in scored if score is not None]
    ranked = sorted(full, key=lambda pair: pair[1].rank(higher_is_better), reverse=True)
    return [trial for trial, _ in ranked[:number]]
