"""Tables, charts and the HTML page of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nufed.runs import Run


def build_report(runs: Sequence[Run], out: Path) -> Path:
    """Write ``report.html`` and ``figures/`` for one run, or several side by side, into ``out``."""
    from nufed.report import page  # altair takes a moment to import: not for `nufed list`

    return page.build_report(runs, out)


def save_counts_chart(
    agents: Sequence[str], classes: Sequence[str], counts: object, path: Path
) -> None:
    """Write a heat map of samples per agent and class (SVG, PNG or HTML by its ending)."""
    from nufed.report import charts

    charts.counts_chart(agents, classes, counts).save(path)


__all__ = ["build_report", "save_counts_chart"]
