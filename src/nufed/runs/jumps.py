"""Finds rounds in which a training became unstable: its update norm or training loss jumped."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from nufed.runs.results import Trained

WINDOW = 10  # earlier values that a value is compared with
ENOUGH = 5  # of them, at least
TIMES = 4.0  # a jump is above so many medians of them …
SPREADS = 10.0  # … and above the median by so many median absolute deviations …
SHARE = 0.25  # … and above this share of the training's first value


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
        elif len(before) >= ENOUGH:
            spread = statistics.median(abs(x - median) for x in before)
            least = max(TIMES * median, median + SPREADS * spread, SHARE * values[0][1])
            if value > least:
                yield round, value, median


def instability(trained: Trained) -> tuple[int, int, str] | None:
    """Where a training became unstable: the first round, how many rounds, and what was seen."""
    series = {
        "the update norm": [(m.round, m.update_norm) for m in trained.metrics],
        "the training loss": [(m.round, m.training_loss) for m in trained.metrics],
    }
    found = [
        (round, value, median, name)
        for name, values in series.items()
        for round, value, median in jumps([(k, x) for k, x in values if x is not None])
    ]
    if not found:
        return None
    round, value, median, name = min(found, key=lambda each: each[0])
    rose = "is not finite" if not math.isfinite(value) else f"rose to {value:.3g}"
    if math.isfinite(value) and median:
        rose += f", {value / median:.3g} times the median of the rounds before"
    return (
        round,
        len({each[0] for each in found}),
        f"training became unstable: {name} {rose}; lower meta_lr or adapt_lr, or set clip_norm",
    )
