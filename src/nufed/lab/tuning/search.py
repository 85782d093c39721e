"""The search: batches of trials for every method, each halved over rounds, within one budget.

Trials are asked for in batches of a fixed size, for all methods at once, and told in their order.
Each trial of a batch is trained to the first rung; the best third is trained further, to twice as
many rounds, and so on (synchronous successive halving: Jamieson and Talwalkar 2016). Every method
may spend the same work, or the same number of trials. Only real training is counted: a promoted
trial resumes.

Settings are proposed at random, on a grid, or by Optuna's TPE. A proposal is a function of the
search's seed, the batch and the trials finished before, and of nothing else, so that a resumed
search repeats its proposals without a stored random state. Methods with the same ranges get the
same random proposals.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TypeAlias

from nufed.errors import InputError
from nufed.lab.config.schema import BudgetUnit, SamplerName
from nufed.lab.runs.tuning_record import (
    FACTOR,
    AskedTrial,
    Range,
    RungScore,
    SearchRecord,
    Trial,
    best_trial,
)
from nufed.seeding import stream

KEEP = 3  # one in so many trials is promoted
LONGER = 2  # factor between the rounds of rungs
LEAST_ROUNDS = 5  # of a rung: after fewer, scores hardly depend on training
BATCH = 9  # trials of a method proposed together, for any number of workers
MAX_DRAWS = 200  # at random, for one proposal that was not tried before
TPE_DRAWS = 3  # per proposal

Settings: TypeAlias = dict[str, Any]
Predict: TypeAlias = Callable[[str, Mapping[str, Any]], float]
"""The predicted work of a round, of a method with some settings."""
Train: TypeAlias = Callable[[Sequence[AskedTrial], int], Sequence[RungScore]]
"""Trains trials further, to so many rounds, and scores them."""


def rungs_of(rounds: int, halvings: int) -> list[int]:
    """The numbers of rounds after which trials are compared; the last is all of them.

    >>> rungs_of(100, 2), rungs_of(12, 2), rungs_of(2, 2)
    ([25, 50, 100], [6, 12], [2])
    """
    shorter = {math.ceil(rounds / LONGER**k) for k in range(1, halvings + 1)}
    return [*sorted(rung for rung in shorter if LEAST_ROUNDS <= rung < rounds), rounds]


def check_budget(budget: float, work: Mapping[str, float], per: BudgetUnit = "gradient") -> float:
    """The work of a full training by the cheapest method, which is the unit of the budget.

    Refuses a budget below one trial, or below one full training of every method.
    """
    if per == "trial":
        if budget != int(budget):
            raise InputError(f"tune.budget = {budget:g}: trials are counted, give a whole number")
        return min(work.values()) or 1.0
    for method, gradients in work.items():
        if not gradients:
            raise InputError(
                f"{method} reports no gradients, so that no budget can be counted: its "
                "agent_update must return its cost"
            )
    cheapest, dearest = min(work, key=lambda m: work[m]), max(work, key=lambda m: work[m])
    unit = work[cheapest]
    if budget * unit < work[dearest]:
        least = math.ceil(work[dearest] / unit)
        raise InputError(
            f"tune.budget = {budget:g}: must be {least} or more, one full training of every method:"
            f" {dearest} takes {work[dearest]:,.0f} gradients, and the unit of the budget is "
            f"{unit:,.0f}, a full training of {cheapest}"
        )
    return unit


@dataclass
class _Account:
    """One method's side of the search."""

    name: str
    allowed: float
    predict: Predict
    rungs: Sequence[int]
    trials_allowed: int | None = None  # if trials are counted
    trials: list[Trial] = field(default_factory=list)
    spent: int = 0
    ratio: float = 1.0  # of real to predicted work, so far

    @property
    def most_trials(self) -> int:
        """What the budget pays for at the first rung: trials that fail at once cost nothing."""
        if self.trials_allowed is not None:
            return self.trials_allowed
        return math.ceil(self.allowed / (self.rungs[0] * self.predict(self.name, {})))

    def cost(self, asked: AskedTrial, rounds: int) -> float:
        """The predicted work of training a trial for ``rounds`` rounds."""
        return self.ratio * rounds * self.predict(self.name, asked.settings)

    def affordable(self, asked: Sequence[AskedTrial]) -> int:
        """How many of these trials the rest of the budget pays for, with their promotions."""
        for number in range(len(asked), 0, -1):
            some, before, total = list(asked[:number]), 0, 0.0
            for rounds in self.rungs:
                total += sum(self.cost(each, rounds - before) for each in some)
                some.sort(key=lambda each: -self.cost(each, 1))  # the dearest may be the best
                some, before = some[: promoted_of(len(some))], rounds
            if self.spent + total <= self.allowed * (1 + 1e-9):
                return number
        return 0


def promoted_of(trials: int) -> int:
    """How many of a batch of trials are promoted to the next rung."""
    return max(1, trials // KEEP)


def search(
    plan: SearchRecord,
    predict: Predict,
    train: Train,
    discard: Callable[[AskedTrial], None],
) -> list[Trial]:
    """All trials of a search, in the order in which they were proposed.

    Args:
        plan: what is searched.
        predict: the work of a round.
        train: trains trials to a rung; a trial that was there before resumes.
        discard: called with every trial that is not trained further.
    """
    number = int(plan.budget) if plan.per == "trial" else None
    accounts = {
        name: _Account(name, plan.allowed, predict, plan.rungs, number) for name in plan.methods
    }
    trials: list[Trial] = []
    for batch in itertools.count():
        asked: list[AskedTrial] = []
        for account in accounts.values():
            asked += _ask(plan, account, batch, first=len(trials) + len(asked))
        if not asked:
            return trials
        scores = _halve(plan, accounts, asked, train, discard)
        told = [Trial(**each.model_dump(), rungs=scores[each.number]) for each in asked]
        for trial in told:
            accounts[trial.method].trials.append(trial)
        trials += told
    raise AssertionError("a search ends when its budget is spent")


def _ask(plan: SearchRecord, account: _Account, batch: int, first: int) -> list[AskedTrial]:
    """A method's trials of a batch, as many as its budget pays for."""
    number = min(BATCH, account.most_trials - len(account.trials))
    if number <= 0:
        return []
    seed = plan.config["seeds"][0]
    asked = [
        AskedTrial(number=first + k, method=account.name, batch=batch, seed=seed, settings=settings)
        for k, settings in enumerate(propose(plan, account.name, account.trials, number, batch))
    ]
    return asked[: account.affordable(asked)]


def _halve(
    plan: SearchRecord,
    accounts: Mapping[str, _Account],
    asked: Sequence[AskedTrial],
    train: Train,
    discard: Callable[[AskedTrial], None],
) -> dict[int, list[RungScore]]:
    """The scores of a batch by trial: of all at the first rung, of the promoted at the others."""
    scores: dict[int, list[RungScore]] = {each.number: [] for each in asked}
    live = list(asked)
    for rounds in plan.rungs:
        for each, score in zip(live, train(live, rounds), strict=True):
            account, earlier = accounts[each.method], scores[each.number]
            account.spent += score.work - (earlier[-1].work if earlier else 0)
            earlier.append(score)
        promoted: list[AskedTrial] = []
        if rounds != plan.rungs[-1]:
            for account in accounts.values():
                rivals = [each for each in live if each.method == account.name]
                promoted += _promoted(plan, account, rivals, scores, rounds)
        for each in live:
            if each not in promoted:
                discard(each)
        live = promoted
    return scores


def _promoted(
    plan: SearchRecord,
    account: _Account,
    live: Sequence[AskedTrial],
    scores: Mapping[int, list[RungScore]],
    rounds: int,
) -> list[AskedTrial]:
    """The best third of a method's trials, as far as the rest of the budget pays for them.

    The best one is promoted while any budget is left, or as long as no trial of the method was
    trained to the end: where predictions were too low, a method may exceed its budget for it.
    """
    done = [each for each in live if scores[each.number][-1].failure is None]
    predicted = sum(rounds * account.predict(account.name, each.settings) for each in done)
    if predicted:
        account.ratio = sum(scores[each.number][-1].work for each in done) / predicted
    best = sorted(
        done, key=lambda each: scores[each.number][-1].rank(plan.higher_is_better), reverse=True
    )
    further = plan.rungs[plan.rungs.index(rounds) + 1] - rounds
    promoted: list[AskedTrial] = []
    left = account.allowed * (1 + 1e-9) - account.spent
    needed = left > 0 or not any(trial.after(plan.rungs[-1]) for trial in account.trials)
    for each in best[: promoted_of(len(live))]:
        left -= account.cost(each, further)
        if left >= 0 or (each is best[0] and needed):
            promoted.append(each)
    return sorted(promoted, key=lambda each: each.number)


def resolve_sampler(wanted: str) -> SamplerName:
    """The sampler's name; ``auto`` is tpe where Optuna is installed."""
    installed = find_spec("optuna") is not None
    if wanted == "tpe" and not installed:
        raise InputError(
            'tune.sampler = "tpe": needs Optuna; `pip install "nufed[tune]"`, or use "random"'
        )
    if wanted == "auto":
        return "tpe" if installed else "random"
    named: SamplerName = wanted  # type: ignore[assignment]
    return named


def propose(
    plan: SearchRecord, method: str, tried: Sequence[Trial], number: int, batch: int
) -> list[Settings]:
    """Up to ``number`` settings that were not tried before; none if there are no others.

    The first are the settings as configured, if they lie in the ranges. If nothing is searched,
    they are the only proposal.

    Args:
        plan: what is searched.
        method: the name of the method.
        tried: its finished trials.
        number: how many.
        batch: that they are for.
    """
    ranges, configured = plan.ranges(method, tried), plan.methods[method].configured
    known = [trial.settings for trial in tried]
    proposed: list[Settings] = []
    if not batch and all(each.contains(configured[each.setting]) for each in ranges):
        proposed.append({each.setting: configured[each.setting] for each in ranges})
    if not ranges:
        return proposed if not batch else []
    drawn: Iterable[Settings] = _random(ranges, number, plan.seed, batch)
    if plan.sampler == "grid":
        drawn = _grid(ranges, plan.seed)
    if plan.sampler == "tpe" and tried:
        model = _tpe(plan, ranges, tried, number, batch)
        drawn = itertools.chain(model, drawn)  # at random where TPE repeats itself
    for settings in itertools.chain(_beyond(plan, method, tried, ranges), drawn):
        if len(proposed) >= number:
            break
        if settings not in proposed and settings not in known:
            proposed.append(settings)
    return proposed[:number]


def _beyond(
    plan: SearchRecord, method: str, tried: Sequence[Trial], ranges: Sequence[Range]
) -> list[Settings]:
    """The best settings, each moved by a factor of 3 into what its range has just grown by."""
    best = best_trial(tried, plan.higher_is_better)
    if best is None:
        return []
    last = max(trial.batch for trial in tried)
    earlier = [trial for trial in tried if trial.batch < last]
    moved = []
    for now, before in zip(ranges, plan.ranges(method, earlier), strict=True):
        if now != before:
            factor = FACTOR if now.high > before.high else 1 / FACTOR
            value = now.at(now.position(best.settings[now.setting] * factor))
            moved.append({**best.settings, now.setting: value})
    return moved


def _random(ranges: Sequence[Range], number: int, seed: int, batch: int) -> Iterator[Settings]:
    """Independent draws, log-uniform where a range is logarithmic."""
    for draw in range(MAX_DRAWS * number):
        positions = stream(seed, "tuned settings", batch, step=draw).random(len(ranges))
        yield {each.setting: each.at(float(u)) for each, u in zip(ranges, positions, strict=True)}


def _grid(ranges: Sequence[Range], seed: int) -> Iterator[Settings]:
    """All points of the grid in a random order, so that a part of them covers it evenly."""
    points = list(itertools.product(*(each.grid() for each in ranges)))
    for place in stream(seed, "order of the grid").permutation(len(points)):
        yield {each.setting: v for each, v in zip(ranges, points[place], strict=True)}


def _tpe(
    plan: SearchRecord, ranges: Sequence[Range], tried: Sequence[Trial], number: int, batch: int
) -> list[Settings]:
    """Draws of Optuna's multivariate TPE, all before any of their results is known.

    A trial that was not trained to the end is reported as pruned, with its score after its last
    rung: TPE ranks it below those trained longer. A failed trial ranks last.
    """
    import optuna

    axes = {each.setting: _distribution(each) for each in ranges}
    entropy = int(stream(plan.seed, "tuned settings", batch).integers(2**32))
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about experimental arguments
            sampler = optuna.samplers.TPESampler(
                seed=entropy, n_startup_trials=0, multivariate=True, constant_liar=True
            )
            study = optuna.create_study(
                sampler=sampler, direction="maximize" if plan.higher_is_better else "minimize"
            )
            study.add_trials(_history(ranges, tried, axes))
            asked = [study.ask(axes).params for _ in range(TPE_DRAWS * number)]
    finally:
        optuna.logging.set_verbosity(before)
    return [
        {each.setting: _value(each, params[each.setting]) for each in ranges} for params in asked
    ]


def _history(ranges: Sequence[Range], tried: Sequence[Trial], axes: Mapping[str, Any]) -> list[Any]:
    """The finished trials, as Optuna's."""
    from optuna.trial import TrialState, create_trial

    most = max(trial.last.rounds for trial in tried)
    told = []
    for trial in tried:
        params = {each.setting: _parameter(each, trial.settings[each.setting]) for each in ranges}
        last, point = trial.last, dict[str, Any](params=params, distributions=dict(axes))
        if last.failure is None and last.rounds == most:
            told.append(create_trial(value=last.score, **point))
        else:
            score = {0: math.nan} if last.failure else {last.rounds: last.score or 0.0}
            told.append(create_trial(state=TrialState.PRUNED, intermediate_values=score, **point))
    return told


def _distribution(searched: Range) -> Any:
    from optuna import distributions

    if searched.choices:
        return distributions.CategoricalDistribution(list(range(len(searched.choices))))
    if searched.whole:
        return distributions.IntDistribution(
            int(searched.low), int(searched.high), log=searched.log
        )
    return distributions.FloatDistribution(searched.low, searched.high, log=searched.log)


def _parameter(searched: Range, value: Any) -> Any:
    """Optuna's parameter for a value."""
    return searched.choices.index(value) if searched.choices else value


def _value(searched: Range, parameter: Any) -> Any:
    """The value of Optuna's parameter."""
    if searched.choices:
        return searched.choices[parameter]
    return parameter if searched.whole else searched.at(searched.position(parameter))
