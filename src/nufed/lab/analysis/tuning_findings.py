"""What a search shows beside its choices: sensitivity, edges of ranges, certainty."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod
from statistics import fmean
from typing import Any

import tomli_w

from nufed.lab.runs.tuning_record import Range, Trial, TuningRecord, finalists

EDGE = 0.05  # share of a range at each end that counts as its edge
ENOUGH = 10  # trials per searched setting from which a conclusion is drawn


@dataclass(frozen=True)
class Edge:
    """A choice at the edge of its range, and the command that searches a wider one."""

    method: str
    setting: str
    value: Any
    side: str
    range: Range
    command: str


@dataclass(frozen=True)
class Lost:
    """The score lost with another value; ``score`` is None if every such trial failed."""

    score: float | None
    rounds: int


@dataclass(frozen=True)
class Sensitivity:
    """The score lost if a setting is three times smaller or larger than the chosen value.

    On a linear range: a third of the range. Of choices, ``larger`` is the best other choice. The
    best score among trials near the chosen value (within a factor of √3) minus that of trials near
    the other one, whatever their other settings, after the largest number of rounds that both were
    trained for. None: nothing was tried there.
    """

    method: str
    setting: str
    value: Any
    smaller: Lost | None
    larger: Lost | None


@dataclass(frozen=True)
class Repeated:
    """A finalist: its score in the search, and those with other seeds (None: it failed)."""

    trial: Trial
    chosen: bool
    score: float
    scores: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        valid = [score for score in self.scores if score is not None]
        return fmean(valid) if valid and len(valid) == len(self.scores) else None


@dataclass(frozen=True)
class Lead:
    """The lead of one method's choice over another's: mean difference over other seeds, and
    with how many of them it is better."""

    method: str
    behind: str
    difference: float
    wins: int
    seeds: int


@dataclass(frozen=True)
class TooFew:
    """A method with too few trials for its searched settings; ``full``: trained to the end."""

    method: str
    trials: int
    full: int
    settings: int


def edges(record: TuningRecord) -> list[Edge]:
    """The choices at an edge of their range, unless the setting can't go beyond it."""
    at_edge = []
    for method in record.chosen:
        choice = record.choice(method)
        for span in record.ranges(method):
            if not span.log:  # choices, and shares, which are bounded
                continue
            value = choice.settings[span.setting]
            place, side = span.position(value), span.open_side(choice, record.of(method))
            if side is None and not EDGE < place < 1 - EDGE:
                side = "lower" if place <= EDGE else "upper"
            if side is not None:
                command = _widening(record, method, span.wider(side))
                at_edge.append(Edge(method, span.setting, value, side, span, command))
    return at_edge


def _widening(record: TuningRecord, method: str, wider: Range) -> str:
    """The command that repeats the search with a wider range; it names all ranges of the method."""
    ranges = [wider if each.setting == wider.setting else each for each in record.ranges(method)]
    words = ", ".join(f"{each.setting} = {_toml(each)}" for each in ranges)
    return f"{record.search.command} {shlex.quote(f'tune.methods.{method}={{{words}}}')}"


def _toml(span: Range) -> str:
    if span.choices:
        ends: Sequence[Any] = span.choices
    elif span.whole:
        ends = [int(span.low), int(span.high)]
    else:
        ends = [float(f"{span.low:.6g}"), float(f"{span.high:.6g}")]
    text = tomli_w.dumps({"x": list(ends)}).partition("=")[2]
    return "".join(text.split()).replace(",]", "]")


def sensitivities(record: TuningRecord) -> list[Sensitivity]:
    """The sensitivity of every searched setting of every method with a choice."""
    rows = []
    for method in record.chosen:
        value_of = record.choice(method).settings
        for span in record.ranges(method):
            value = value_of[span.setting]
            smaller, larger = (_lost(record, method, span, value, side) for side in (-1, 1))
            rows.append(Sensitivity(method, span.setting, value, smaller, larger))
    return rows


def _lost(record: TuningRecord, method: str, span: Range, value: Any, side: int) -> Lost | None:
    """The score lost on one side of the chosen value."""
    trials = record.of(method)
    if span.choices:
        near = [t for t in trials if t.settings[span.setting] == value]
        far = [t for t in trials if t.settings[span.setting] != value] if side > 0 else []
    else:
        here, width = span.position(value), span.steps()
        away = {t.number: (span.position(t.settings[span.setting]) - here) * width for t in trials}
        near = [t for t in trials if abs(away[t.number]) <= 0.5]
        far = [t for t in trials if 0.5 < side * away[t.number] <= 1.5]
    sign = 1 if record.search.higher_is_better else -1
    for rounds in reversed(record.search.rungs):
        best = [_best(some, rounds, record) for some in (near, far)]
        if best[0] is not None and best[1] is not None:
            return Lost(sign * (best[0] - best[1]), rounds)
    return Lost(None, record.search.rungs[0]) if far else None


def _best(trials: list[Trial], rounds: int, record: TuningRecord) -> float | None:
    first = finalists(trials, rounds, 1, record.search.higher_is_better)
    score = first[0].after(rounds) if first else None
    return None if score is None else score.score


def repeated(record: TuningRecord) -> list[Repeated]:
    """The finalists of every method with their repeats: methods best first, by their choice."""
    rounds, better = record.search.rungs[-1], record.search.higher_is_better
    numbers = {trial.number for trial in record.repeats} | set(record.chosen.values())
    rows = []
    for method, chosen in record.chosen.items():
        final_trials = [trial for trial in record.of(method) if trial.number in numbers]
        for trial in finalists(final_trials, rounds, len(final_trials), better):
            last = trial.after(rounds)
            again = [r for r in record.repeats if r.number == trial.number]
            scores = tuple(None if r.failure else r.last.score for r in again)
            assert last is not None and last.score is not None
            rows.append(Repeated(trial, trial.number == chosen, last.score, scores))
    sign = -1 if better else 1

    def rank(row: Repeated) -> float:
        score = row.score if row.mean is None else row.mean
        return sign * score

    best = {row.trial.method: rank(row) for row in rows if row.chosen}
    return sorted(rows, key=lambda row: (best[row.trial.method], row.trial.method, not row.chosen))


def leads(rows: Sequence[Repeated], record: TuningRecord) -> list[Lead]:
    """Each method's choice compared with that of the next one, in this order."""
    sign = 1 if record.search.higher_is_better else -1
    compared = []
    for a, b in pairwise(rows):
        ahead = [sign * ((x or 0.0) - (y or 0.0)) for x, y in zip(a.scores, b.scores, strict=True)]
        wins = sum(difference > 0 for difference in ahead)
        compared.append(Lead(a.trial.method, b.trial.method, fmean(ahead), wins, len(ahead)))
    return compared


def better_with_other_seeds(record: TuningRecord) -> list[tuple[Repeated, Repeated]]:
    """Finalists that did better with other seeds than the choice of their method, and that."""
    rows = repeated(record)
    chosen = {row.trial.method: row for row in rows if row.chosen}
    sign = 1 if record.search.higher_is_better else -1
    pairs = [(row, chosen[row.trial.method]) for row in rows]
    return [
        (row, choice)
        for row, choice in pairs
        if row.mean is not None and choice.mean is not None and sign * (row.mean - choice.mean) > 0
    ]


def too_few_trials(record: TuningRecord) -> Iterator[TooFew]:
    """The methods of which so few settings were tried that the choice is chance."""
    for method in record.chosen:
        ranges, trials = record.ranges(method), record.of(method)
        listed = record.search.sampler == "grid"
        points = prod(len(span.grid()) if listed or span.choices else inf for span in ranges)
        if len(trials) < min(points, ENOUGH * len(ranges)):
            full = sum(trial.after(record.search.rungs[-1]) is not None for trial in trials)
            yield TooFew(method, len(trials), full, len(ranges))


def best_so_far(record: TuningRecord) -> list[dict[str, Any]]:
    """The best fully trained score by work spent, in units of the budget, after each batch."""
    search, points = record.search, []
    for method in search.methods:
        spent, done = 0, list[Trial]()
        batches = sorted({trial.batch for trial in record.of(method)})
        for batch in batches:
            new = [trial for trial in record.of(method) if trial.batch == batch]
            spent, done = spent + sum(trial.last.work for trial in new), done + new
            best = _best(done, search.rungs[-1], record)
            if best is not None:
                trials = len(done)
                work = spent / search.unit
                points.append({"method": method, "work": work, "score": best, "trials": trials})
    return points
