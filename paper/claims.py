"""The paper's claims about its figures, each tested on our measurements.

A claim is one sentence; its comparisons are the pairs of methods that it concerns. Hessian-free and
exact gMeta agree to rounding, so that only one of them is compared with FedAvg.

An accuracy is that of the last round, mean over all agents, after the number of fine-tuning steps
that the figure states. A difference is paired by seed and agent and has two 95 % intervals (over
seeds, over agents); the wider counts. Rules, the same for all:

- "better", "faster", "degraded": held if the interval lies on the claimed side of 0; not held if it
  excludes a difference of RELEVANT (or of one evaluation, for rounds) on that side; else undecided.
- "not much affected": held if the interval lies within ±SMALL; not held if it lies outside; else
  undecided.
- "faster": not testable if both methods reach the target before training, in every seed.
- A claim has the verdict of its comparisons if they agree; else it is mixed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nufed.lab.runs.results import Estimate
from paper.differences import Difference, Verdict, tenths
from paper.summary import Lr, Summary, Values, summary

RELEVANT = 0.005
SMALL = 0.01
TARGET_MARGIN = 0.005  # the target accuracy is this much below the lowest final one of the figure

Judge = Callable[[Difference], Verdict]


@dataclass(frozen=True)
class Comparison:
    """Two methods, or one in two settings."""

    compared: str
    values: str
    difference: Difference
    unit: str
    verdict: Verdict


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper with the comparisons that test it."""

    stage: str
    sentence: str
    comparisons: Sequence[Comparison]

    @property
    def verdict(self) -> Verdict | Literal["mixed"]:
        verdicts = {comparison.verdict for comparison in self.comparisons}
        return verdicts.pop() if len(verdicts) == 1 else "mixed"


def protocol_claims() -> list[Claim]:
    """The paper's own protocol: every method is fine-tuned with α = 0.01."""
    one, two, three, four = (summary(f"fig{number}") for number in (1, 2, 3, 4))
    found: list[Claim] = []
    for stage, run, where in (("fig1", one, "CIFAR-10"), ("fig2", two, "CIFAR-100")):
        if run:
            found += _better(stage, run, where, "as_trained")
    if one:
        found += _faster("fig1", one, "CIFAR-10", "as_trained")
    if one and two:
        found.append(_harder(one, two))
    if three:
        found += _batches(three, three, "fig3", ("fedavg", "per-fedavg-fo", "per-fedavg-hf"), "-40")
    if four:
        found += _batches(four, four, "fig4", ("gmeta-fo", "gmeta-hf"), "-40")
    return found


def fair_claims() -> list[Claim]:
    """The same claims with every method's own α, chosen on validation samples."""
    found: list[Claim] = []
    for stage, where in (
        ("fair-fig1", "CIFAR-10"),
        ("fair-fig2", "CIFAR-100"),
        ("fair-standardised", "CIFAR-10, standardised inputs"),
    ):
        if run := summary(stage):
            found += _better(stage, run, where, "chosen")
            if where != "CIFAR-100":
                found += _faster(stage, run, where, "chosen")
    one, large = summary("fair-fig1"), summary("fair-batch")
    if one and large:
        methods = ("fedavg", "per-fedavg-fo", "gmeta-fo")
        found += _batches(one, large, "fair-batch", methods, "")
    return found


RIVALS = {
    "Per-FedAvg": [("gmeta-fo", "per-fedavg-fo"), ("gmeta-hf", "per-fedavg-hf")],
    "FedAvg": [("gmeta-fo", "fedavg"), ("gmeta-exact", "fedavg")],
}


def _pairs(run: Summary) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for rival, pairs in RIVALS.items():
        yield rival, [pair for pair in pairs if set(pair) <= set(run.methods)]


def _better(stage: str, run: Summary, where: str, lr: Lr) -> Iterator[Claim]:
    for rival, pairs in _pairs(run):
        comparisons = [
            _accuracies(
                f"{ours} against {theirs}",
                run.agents(ours, 3, lr=lr),
                run.agents(theirs, 3, lr=lr),
                lambda difference: difference.above(RELEVANT),
            )
            for ours, theirs in pairs
        ]
        yield Claim(stage, f"a better accuracy than {rival} ({where})", comparisons)


def _faster(stage: str, run: Summary, where: str, lr: Lr) -> Iterator[Claim]:
    target = lowest_final(run, lr) - TARGET_MARGIN
    every = run.config["eval_every"]
    for rival, pairs in _pairs(run):
        comparisons = []
        for ours, theirs in pairs:
            a, b = (rounds_to(run, method, 3, target, lr) for method in (ours, theirs))
            difference = Difference(Estimate.of(b - a))
            testable = a.any() or b.any()  # else the untrained network has the target accuracy
            comparisons.append(
                Comparison(
                    f"{ours} against {theirs}",
                    f"{_rounds(a, run)} against {_rounds(b, run)}",
                    difference,
                    "rounds fewer",
                    difference.above(every) if testable else "not testable",
                )
            )
        words = f"faster than {rival} ({where}; rounds until {100 * target:.1f} % are reached)"
        yield Claim(stage, words, comparisons)


def lowest_final(run: Summary, lr: Lr) -> float:
    """The lowest final accuracy of a figure's methods."""
    return min(float(run.agents(method, 3, lr=lr).mean()) for method in run.methods)


def rounds_to(run: Summary, method: str, step: int, target: float, lr: Lr) -> Values:
    """The first evaluated round with at least the target accuracy, by seed; else one past the end.

    Seeds have splits of different difficulty: the target of a seed is as far below the lowest final
    accuracy of its own methods as ``target`` is below that of all.
    """
    shift = lowest_final(run, lr) - target
    own = np.min([run.curve(m, step, lr=lr)[:, -1] for m in run.methods], axis=0) - shift
    evaluated = run.rounds(method, lr)
    rounds = np.array([*evaluated, evaluated[-1] + run.config["eval_every"]])
    reached = run.curve(method, step, lr=lr) >= own[:, None]
    first = np.where(reached.any(axis=1), reached.argmax(axis=1), len(rounds) - 1)
    return rounds[first].astype(float)


def _rounds(values: Values, run: Summary) -> str:
    more = " or more" if (values > run.config["rounds"]).any() else ""
    return f"{values.mean():.0f}{more}"


def _harder(easy: Summary, hard: Summary) -> Claim:
    """One claim about all methods: their mean accuracy on one data set and on the other."""
    a, b = (np.mean([run.agents(m, 3) for m in easy.methods], axis=0) for run in (easy, hard))
    spread = np.sqrt(a.var(ddof=1) / a.size + b.var(ddof=1) / b.size)
    seeds = Estimate.of(a.mean(axis=1) - b.mean(axis=1))
    agents = Estimate(seeds.mean, float(1.96 * spread))  # other agents: not paired
    difference = Difference(seeds, agents)
    words = "accuracies are degraded on CIFAR-100 compared to CIFAR-10"
    values = f"{tenths(a.mean())} % against {tenths(b.mean())} %"
    compared = "all methods: CIFAR-10 against CIFAR-100"
    verdict = difference.above(RELEVANT)
    return Claim("fig2", words, [Comparison(compared, values, difference, "points", verdict)])


def _batches(
    small: Summary, large: Summary, stage: str, methods: Sequence[str], suffix: str
) -> Iterator[Claim]:
    """D = 40 and three steps against D = 120; the former are called ``method + suffix``."""
    degraded: Judge = lambda difference: difference.above(RELEVANT)  # noqa: E731
    little: Judge = lambda difference: difference.small(SMALL)  # noqa: E731
    for family, words, step, judge in (
        ("fedavg", "FedAvg is degraded by a batch three times as large and one step", 1, degraded),
        ("per-fedavg", "Per-FedAvg is not much affected by a larger batch and one step", 1, little),
        ("gmeta", "gMeta is significantly degraded when a single step is used", 1, degraded),
        ("gmeta", "with three steps, D = 120 does not change gMeta much", 3, little),
    ):
        comparisons = [
            _accuracies(
                f"{method}: D = 40, 3 steps against D = 120, {step} step{'s'[: step > 1]}",
                small.agents(f"{method}{suffix}", 3),
                large.agents(f"{method}-120", step),
                judge,
            )
            for method in methods
            if method.startswith(family)
        ]
        if comparisons:
            yield Claim(stage, words, comparisons)


def _accuracies(compared: str, a: Values, b: Values, judge: Judge) -> Comparison:
    difference = Difference.paired(a, b)
    values = f"{tenths(a.mean())} % against {tenths(b.mean())} %"
    return Comparison(compared, values, difference, "points", judge(difference))
