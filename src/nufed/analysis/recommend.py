"""The rules that choose advice from measured scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nufed.analysis.advice_records import Against, Amount, Automatic
from nufed.bundle.adapting import Array
from nufed.runs import Estimate


@dataclass(frozen=True)
class Choice:
    """A method, a step size relative to its bundle's, and a number of steps."""

    method: str
    times: float
    steps: int


def recommend(scores: dict[tuple[str, float], Array]) -> Choice:
    """The cheapest choice that is as good as the best: within one standard error over agents.

    Fewer steps are cheaper; then the step size of the bundle, then the better score.
    ``scores`` has a row per agent and a column per number of steps, for methods and step sizes.
    """
    found = {
        Choice(method, times, steps): np.nan_to_num(own[:, steps], nan=-1e9)
        for (method, times), own in scores.items()
        for steps in range(own.shape[1])
    }
    top = max(found.values(), key=lambda values: float(values.mean()))

    def as_good(values: Array) -> bool:
        gaps = top - values
        noise = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        return bool(gaps.mean() <= noise)

    good = {choice: values.mean() for choice, values in found.items() if as_good(values)}
    return min(good, key=lambda c: (c.steps, abs(math.log(c.times)), -good[c]))


def compare_automatic(chosen: Sequence[int], scores: Array, default: int) -> Automatic:
    """Steps that each agent chose itself, compared with fixed numbers of steps for all.

    ``scores`` has a row per agent and a column per number of steps. The best fixed number is chosen
    in hindsight, on the same scores.
    """
    own = scores[np.arange(len(chosen)), chosen]
    best = int(np.nan_to_num(scores.mean(axis=0), nan=-np.inf).argmax())
    loss = Estimate.of((own - scores[:, best]).tolist())
    gain = Estimate.of((own - scores[:, default]).tolist())
    return Automatic(
        float(own.mean()),
        float(np.mean(chosen)),
        Against(best, loss.mean, loss.half_width),
        Against(default, gain.mean, gain.half_width),
    )


def fewest_samples(amounts: Sequence[Amount]) -> int | None:
    """The fewest samples from which on the gain of adapting exceeds its interval."""
    fewest = None
    for row in reversed(amounts):
        if not (row.interval is not None and row.gain > row.interval):
            break
        fewest = row.samples
    return fewest
