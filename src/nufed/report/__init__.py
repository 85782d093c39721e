"""Tables, charts and the HTML page of finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nufed.runs import Run


def build_report(runs: Sequence[Run], out: Path) -> Path:
    """Write ``report.html`` and ``figures/`` for one run, or several side by side, into ``out``."""
    from nufed.report import page  # altair takes a moment to import: not for `nufed list`

    return page.build_report(runs, out)


def save_bounds_charts(bounds: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the charts of ``nufed bounds`` as SVG and PNG, and say where."""
    from nufed.report import charts, page

    return [page.save_chart(chart, folder, name) for name, _, chart in charts.bounds_charts(bounds)]


def save_advice_chart(advice: Mapping[str, Any], folder: Path) -> Path:
    """Write the chart of ``nufed advise`` as SVG and PNG, and say where."""
    from nufed.report import page
    from nufed.report.advice_chart import advice_chart

    return page.save_chart(advice_chart(advice), folder, "advice")


def save_counts_chart(
    agents: Sequence[str], classes: Sequence[str], counts: object, path: Path
) -> None:
    """Write a heat map of samples per agent and class (SVG, PNG or HTML by its ending)."""
    import altair

    from nufed.report import charts

    spec = charts.spec_of(charts.counts_chart(agents, classes, counts))
    altair.Chart.from_dict(spec).save(path)


__all__ = ["build_report", "save_advice_chart", "save_bounds_charts", "save_counts_chart"]
