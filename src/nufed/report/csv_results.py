"""The results of runs as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence

from nufed.data.csv_file import to_cell
from nufed.report.tables import run_name
from nufed.runs import Estimate, Row, Run
from nufed.runs.paired import Paired

ESTIMATES = {
    "global": "shared",
    "personal": "personal",
    "as_trained": "as_trained",
    "balanced": "balanced",
    "minority": "minority",
    "above_majority": "above_majority",
}
NUMBERS = ("weighted_mean", "std", "worst_tenth", "harmed", "loss", "over_samples")


def results_csv(runs: Sequence[Run]) -> str:
    """A line for every method and null baseline of each group, with paired differences.

    Numbers have all their digits; undefined ones are empty. ``…_half_width`` is that of the 95 %
    confidence interval of the column before it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    estimates = [*ESTIMATES, "minus_local", "minus_best"]
    pairs = [column for name in estimates for column in (name, f"{name}_half_width")]
    writer.writerow(["run", "group", "name", "kind", "measure", *pairs, *NUMBERS])
    for run in runs:
        differences = run.paired()
        for row in run.rows():
            names = [run_name(run, runs), row.group, row.name, row.kind, run.measure.name]
            writer.writerow([*map(to_cell, names), *map(_number, _numbers(row, differences))])
    return text.getvalue()


def _numbers(row: Row, differences: Sequence[Paired]) -> Iterator[float | None]:
    """The numbers of a line."""
    for field in ESTIMATES.values():
        estimate: Estimate = getattr(row, field)
        yield from (estimate.mean, estimate.half_width)
    own = [p for p in differences if (p.group, p.name) == (row.group, row.name)]
    nulls = ("local", "majority", "untrained")
    for wanted in (
        [p for p in own if p.against == "local"],
        [p for p in own if p.against not in nulls],
    ):
        yield from (wanted[0].mean, wanted[0].half_width) if wanted else (None, None)
    yield from (getattr(row, field) for field in NUMBERS)


def _number(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else repr(value)
