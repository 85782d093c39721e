"""What ν > 1 gains per communication round, and what it costs per gradient, from one run.

The scores of two methods that differ in ν are compared where both had the same number of rounds,
and where both had computed the same number of gradients, from the evaluations of their curves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from nufed.algorithms.gmeta import GMeta
from nufed.lab.runs import Run
from nufed.lab.runs.results import Estimate, Trained


@dataclass(frozen=True)
class Gain:
    """Scores of ``many`` minus those of ``one``, over seeds.

    Args:
        many, one: the methods, of the largest ν and of ν = 1.
        group: of agents.
        rounds: of both, for ``per_round``.
        per_round: the difference after the same rounds.
        work: how many times as much a round of ``many`` computes; a product counts as two.
        equal_round: the round of ``many`` at which it had computed as much as ``one`` at its end.
        per_gradient: the difference at these gradients.
    """

    many: str
    one: str
    group: str
    rounds: int
    per_round: Estimate
    work: float
    equal_round: int
    per_gradient: Estimate


def gain_of_steps(run: Run) -> Gain | None:
    """None where no two methods differ in ν alone, or no round can be compared."""
    meta = {n: a for n, a in run.config.algorithms().items() if isinstance(a, GMeta)}
    steps = {n: a.adapt_steps for n, a in meta.items() if n in run.methods and a.adapt_steps}
    many = max(steps, key=lambda name: steps[name], default="")
    one = next((name for name, nu in steps.items() if nu == 1), "")
    if (
        not many
        or not one
        or steps[many] < 2
        or run.config.steps_of(many) != run.config.steps_of(one)
    ):
        return None
    group, shown = run.groups[-1], run.config.steps_of(many)[0]
    ends = [min(t.metrics[-1].round for t in run.methods[name].values()) for name in (many, one)]
    done, whole = (_work(next(iter(run.methods[name].values()))) for name in (many, one))
    scores = {
        name: {
            seed: {
                m.round: score
                for m in t.metrics
                if group in m.evaluation
                and (score := m.evaluation[group].score[shown]) is not None  # it diverged
            }
            for seed, t in run.methods[name].items()
        }
        for name in (many, one)
    }
    seeds = sorted(scores[many].keys() & scores[one].keys())
    if not seeds:
        return None
    both = set.intersection(*(set(scores[n][s]) for n in (many, one) for s in seeds))
    rounds = max((k for k in both if k <= min(ends)), default=0)
    of_many = set.intersection(*(set(scores[many][s]) for s in seeds))
    fair = max((k for k in of_many if done[k] <= whole[ends[1]]), default=0)
    if not rounds or not fair or any(ends[1] not in scores[one][s] for s in seeds):
        return None

    def differences(at_many: int, at_one: int) -> Estimate:
        return Estimate.of([scores[many][s][at_many] - scores[one][s][at_one] for s in seeds])

    return Gain(
        many,
        one,
        group,
        rounds,
        differences(rounds, rounds),
        done[rounds] / whole[rounds],
        fair,
        differences(fair, ends[1]),
    )


def _work(trained: Trained) -> list[int]:
    """The gradients computed up to every round."""
    return list(accumulate(m.gradients + 2 * m.hvps if m.round else 0 for m in trained.metrics))
