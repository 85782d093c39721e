"""The sentences of the paper that its figures support, each tested on what was measured.

An accuracy is that of the last round, mean over all agents, after the number of fine-tuning steps
that the figure states. A difference is paired by seed and agent and has two 95 % intervals (over
seeds, over agents); the wider counts. Rules, the same for all:

- "better", "faster", "degraded": held if the interval lies on the claimed side of 0; not held if it
  excludes a difference of MATTERS (or of one evaluation, for rounds) on that side; else undecided.
- "not much affected": held if the interval lies within ±LITTLE; not held if it lies outside; else
  undecided.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nufed.runs.compare import Difference, Verdict
from nufed.runs.results import Estimate
from paper.summary import Summary, Values, summary

STANDARDISED = "fig1-standardised"
MATTERS = 0.005
LITTLE = 0.01
BELOW = 0.005  # the accuracy to be reached: this much below the lowest final one of the figure


@dataclass(frozen=True)
class Claim:
    """One row of the table."""

    figure: str
    sentence: str
    compared: str
    values: str
    difference: Difference
    unit: str
    verdict: Verdict


def claims() -> list[Claim]:
    """Every row whose runs are there."""
    names = ("fig1", STANDARDISED, "fig2", "fig3", "fig4")
    figures = {name: summary(name) for name in names}
    found: list[Claim] = []
    for name, words in (
        ("fig1", "a better accuracy than Per-FedAvg and FedAvg (CIFAR-10)"),
        (STANDARDISED, "the same with standardised inputs"),
        ("fig2", "a better accuracy than Per-FedAvg and FedAvg (CIFAR-100)"),
    ):
        if run := figures[name]:
            found += _better(name, words, run)
    for name in ("fig1", STANDARDISED):
        if run := figures[name]:
            found += _faster(name, run)
    if figures["fig1"] and figures["fig2"]:
        found += _harder(figures["fig1"], figures["fig2"])
    if run := figures["fig3"]:
        found += _larger_batch(run)
    if run := figures["fig4"]:
        found += _own_batch(run)
    return found


PAIRS = [
    ("gmeta-fo", "per-fedavg-fo"),
    ("gmeta-hf", "per-fedavg-hf"),
    ("gmeta-fo", "fedavg"),
    ("gmeta-hf", "fedavg"),
    ("gmeta-exact", "fedavg"),
]


def _pairs(run: Summary) -> list[tuple[str, str]]:
    return [pair for pair in PAIRS if set(pair) <= set(run.methods)]


def _better(figure: str, words: str, run: Summary) -> Iterator[Claim]:
    for ours, theirs in _pairs(run):
        a, b = run.agents(ours, 3), run.agents(theirs, 3)
        difference = Difference.paired(a, b)
        yield _accuracy(figure, words, f"{ours} against {theirs}", a, b, difference, "above")


def _faster(figure: str, run: Summary) -> Iterator[Claim]:
    target = lowest_final(run) - BELOW
    every = run.config["eval_every"]
    words = f"a faster convergence (rounds until {100 * target:.1f} % are reached)"
    for ours, theirs in _pairs(run):
        a, b = (rounds_to(run, method, 3, target) for method in (ours, theirs))
        difference = Difference(Estimate.of(b - a))
        values = f"{_rounds(a, run)} against {_rounds(b, run)}"
        verdict = difference.above(every)
        compared = f"{ours} against {theirs}"
        yield Claim(figure, words, compared, values, difference, "rounds fewer", verdict)


def lowest_final(run: Summary) -> float:
    """The lowest final accuracy of a figure's methods."""
    return min(float(run.agents(method, 3).mean()) for method in run.methods)


def rounds_to(run: Summary, method: str, step: int, target: float) -> Values:
    """The first evaluated round with at least that mean accuracy, by seed; else one past the end.

    Seeds have splits of different difficulty: each has to come as near to the lowest final accuracy
    of its own methods as ``target`` is to that of all.
    """
    shift = lowest_final(run) - target
    own = np.min([run.curve(m, step)[:, -1] for m in run.methods], axis=0) - shift
    rounds = np.array([*run.rounds(method), run.rounds(method)[-1] + run.config["eval_every"]])
    reached = run.curve(method, step) >= own[:, None]
    first = np.where(reached.any(axis=1), reached.argmax(axis=1), len(rounds) - 1)
    return rounds[first].astype(float)


def _rounds(values: Values, run: Summary) -> str:
    more = " or more" if (values > run.config["rounds"]).any() else ""
    return f"{values.mean():.0f}{more}"


def _harder(easy: Summary, hard: Summary) -> Iterator[Claim]:
    words = "accuracies are degraded on CIFAR-100 compared to CIFAR-10"
    for method in easy.methods:
        a, b = easy.agents(method, 3), hard.agents(method, 3)
        spread = np.sqrt(a.var(ddof=1) / a.size + b.var(ddof=1) / b.size)
        seeds = Estimate.of(a.mean(axis=1) - b.mean(axis=1))
        agents = Estimate(seeds.mean, float(1.96 * spread))  # other agents: not paired
        difference = Difference(seeds, agents)
        compared = f"{method}: CIFAR-10 against CIFAR-100"
        yield _accuracy("fig2", words, compared, a, b, difference, "above")


def _larger_batch(run: Summary) -> Iterator[Claim]:
    degraded = "FedAvg is degraded by a batch three times as large and one step"
    little = "Per-FedAvg is not much affected by a larger batch and one step"
    for method, words, kind in (
        ("fedavg", degraded, "above"),
        ("per-fedavg-fo", little, "small"),
        ("per-fedavg-hf", little, "small"),
    ):
        a, b = run.agents(f"{method}-40", 3), run.agents(f"{method}-120", 1)
        compared = f"{method}: D = 40, 3 steps against D = 120, 1 step"
        yield _accuracy("fig3", words, compared, a, b, Difference.paired(a, b), kind)


def _own_batch(run: Summary) -> Iterator[Claim]:
    one = "gMeta is significantly degraded when a single step is used"
    three = "with three steps, D = 120 does not change gMeta much"
    for step, words, kind in ((1, one, "above"), (3, three, "small")):
        for method in ("gmeta-fo", "gmeta-hf"):
            a, b = run.agents(f"{method}-40", 3), run.agents(f"{method}-120", step)
            compared = f"{method}: D = 40, 3 steps against D = 120, {step} step{'s'[: step > 1]}"
            yield _accuracy("fig4", words, compared, a, b, Difference.paired(a, b), kind)


def _accuracy(
    figure: str,
    words: str,
    compared: str,
    a: Values,
    b: Values,
    difference: Difference,
    kind: str,
) -> Claim:
    verdict = difference.above(MATTERS) if kind == "above" else difference.small(LITTLE)
    values = f"{100 * a.mean():.1f} % against {100 * b.mean():.1f} %"
    return Claim(figure, words, compared, values, difference, "points", verdict)
