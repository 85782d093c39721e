"""Warnings about a training, with the likely cause: it became unstable, or ends below its start.

It became unstable where its update norm or training loss jumped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from nufed.evaluate import Measure
from nufed.lab.runs.json_files import or_nan
from nufed.lab.runs.results import Line, Trained

LISTED = 10  # agents named in a sentence
CAUSES = {
    "diverged": "it diverged: lower meta_lr or adapt_lr, or set clip_norm",
    "rose": "the loss rose from {before:.3g} to {after:.3g}, so step sizes are too large for it: "
    "lower meta_lr or adapt_lr, or set clip_norm",
    "stayed": "the loss stayed at {after:.3g}: train for more rounds, or raise meta_lr",
    "fell": "the loss fell from {before:.3g} to {after:.3g}, so it learns but is not yet better "
    "than its start: train for more rounds, or raise meta_lr",
}


def below_start(line: Line, trained: Trained, measure: Measure) -> str | None:
    """Why a method's training is suspect: its agents score lower at the end than at the start.

    Both are the means over agents seen in training of the personal model after the shown steps,
    with the step size of its settings, before round 1 and after the last round. The difference must
    exceed the standard error of the mean over agents, and show in the three digits printed.
    """
    evaluated = [m.evaluation["seen"] for m in trained.metrics if "seen" in m.evaluation]
    if len(evaluated) < 2 or line.steps >= len(evaluated[0].score):
        return None
    ends = (evaluated[0], evaluated[-1])
    before, after = (or_nan(end.score[line.steps]) for end in ends)
    worse = after < before if measure.higher_is_better else after > before
    last = [s.score[line.steps] for s in trained.scores if s.seen]
    with np.errstate(all="ignore"):
        error = float(np.std(last) / math.sqrt(len(last))) if last else 0.0
    worse = worse and _differ(before, after) and not abs(after - before) <= error
    if not (worse or math.isnan(after)):
        return None
    shown = f"{line.after} " if line.after else ""
    finite = [s for s in trained.final if s.seen and math.isfinite(s.loss[line.steps])]
    undefined = [s.name for s in finite if math.isnan(s.score[line.steps])]
    if undefined:
        agents = f"agent{'s' * (len(undefined) > 1)} {', '.join(undefined[:LISTED])}"
        more = f" and {len(undefined) - LISTED} more" if len(undefined) > LISTED else ""
        return (
            f"{shown}has no mean {measure.name}: {measure.name} is NaN for "
            f"{agents}{more}, whose loss is finite; a metric must give a number for every agent"
        )
    loss_before, loss_after = (or_nan(end.loss[line.steps]) for end in ends)
    diverged = math.isnan(after) or not math.isfinite(loss_after)
    cause = "diverged" if diverged else "rose" if loss_after > loss_before else "fell"
    cause = cause if diverged or _differ(loss_before, loss_after) else "stayed"
    return (
        f"{shown}ends below its untrained start on the agents it was "
        f"trained on ({measure.name} {before:.3g} before, {after:.3g} after training); "
        + CAUSES[cause].format(before=loss_before, after=loss_after)
    )


def _differ(one: float, other: float) -> bool:
    return f"{one:.3g}" != f"{other:.3g}"


WINDOW = 10  # earlier values that a value is compared with
MIN_WINDOW = 5  # fewer earlier values tell nothing
MEDIANS = 4.0  # a jump is above so many medians of them …
DEVIATIONS = 10.0  # … and above the median by so many median absolute deviations …
MIN_SHARE = 0.25  # … and above this share of the training's first value


def jumps(values: Sequence[tuple[int, float]]) -> Iterator[tuple[int, float, float]]:
    """The values, each with its round, that lie far above the recent median.

    x_k is a jump if x_k > 4 m, x_k > m + 10 d and x_k > x_1 / 4, with m the median of the up to 10
    values before it (at least 5) and d their median absolute deviation; or if it is not finite.

    Yields:
        The round, the value and the median before it.

    >>> list(jumps([*enumerate([1.0, 0.9, 1.1, 1.0, 0.9, 0.8, 9.0, 0.9])]))
    [(6, 9.0, 0.95)]
    """
    for place, (round, value) in enumerate(values):
        before = [x for _, x in values[max(0, place - WINDOW) : place] if math.isfinite(x)]
        median = statistics.median(before) if before else math.nan
        if not math.isfinite(value):
            yield round, value, median
        elif len(before) >= MIN_WINDOW:
            spread = statistics.median(abs(x - median) for x in before)
            least = max(MEDIANS * median, median + DEVIATIONS * spread, MIN_SHARE * values[0][1])
            if value > least:
                yield round, value, median


def instability(trained: Trained) -> tuple[int, int, str] | None:
    """Where a training became unstable: the first round, how many rounds, and what was seen."""
    series = {
        "the update norm": [(m.round, m.update_norm) for m in trained.metrics],
        "the training loss": [(m.round, m.training_loss) for m in trained.metrics],
    }
    unstable = [
        (round, value, median, name)
        for name, values in series.items()
        for round, value, median in jumps([(k, x) for k, x in values if x is not None])
    ]
    if not unstable:
        return None
    round, value, median, name = min(unstable, key=lambda each: each[0])
    rose = "is not finite" if not math.isfinite(value) else f"rose to {value:.3g}"
    if math.isfinite(value) and median:
        rose += f", {value / median:.3g} times the median of the rounds before"
    return (
        round,
        len({each[0] for each in unstable}),
        f"training became unstable: {name} {rose}; lower meta_lr or adapt_lr, or set clip_norm",
    )
