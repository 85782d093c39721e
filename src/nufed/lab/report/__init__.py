"""Tables, charts and the HTML page of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nufed.errors import RunError
from nufed.lab.analysis.advise import Advice
from nufed.lab.runs import Run
from nufed.lab.runs.bounds_record import BoundsRecord
from nufed.lab.runs.tuning_record import TuningRecord


def build_report(runs: Sequence[Run], out: Path, *, figures: bool | None = True) -> Path:
    """Write ``report.html`` and ``figures/`` for one run, or several side by side, into ``out``.

    Without ``figures`` only the page is written, with its tables and interactive charts; with None
    only its tables.
    """
    from nufed.lab.report import page  # altair is slow to import

    return page.build_report(runs, out, figures=figures)


def build_tune_page(record: TuningRecord, out: Path, *, figures: bool = True) -> Path:
    """Write ``tune.html`` and ``figures/`` of a finished search into ``out``."""
    from nufed.lab.report import tune_page  # altair is slow to import

    return tune_page.build_tune_page(record, out, figures=figures)


def save_bounds_charts(bounds: BoundsRecord, folder: Path) -> list[Path]:
    """Write the charts of ``nufed bounds`` as SVG and PNG; return their paths."""
    from nufed.lab.report import figures
    from nufed.lab.report.charts import bounds_charts

    return figures.save_figures({n: chart for n, _, chart in bounds_charts(bounds)}, folder)


def save_advice_chart(advice: Advice, folder: Path) -> list[Path]:
    """Write the chart of ``nufed advise`` as SVG and PNG; return their paths."""
    from nufed.lab.report import figures
    from nufed.lab.report.charts import advice_chart

    return figures.save_figures({"advice": advice_chart(advice)}, folder)


def save_counts_chart(
    agents: Sequence[str], classes: Sequence[str], counts: object, path: Path
) -> None:
    """Write a heat map of samples per agent and class (SVG, PNG or HTML by file extension)."""
    from nufed.lab.report import charts as agent_charts
    from nufed.lab.report import figures

    spec = figures.spec_of(agent_charts.counts_chart(agents, classes, counts))
    if path.suffix == ".html":
        import altair

        altair.Chart.from_dict(spec).save(path)
        return
    drawn = figures.draw({"counts": spec})
    if drawn.failure:
        raise RunError(f"{path} was not written: {drawn.failure}")
    figure = drawn.figures["counts"]
    path.write_bytes(figure.png if path.suffix == ".png" else figure.svg.encode())


__all__ = [
    "build_report",
    "build_tune_page",
    "save_advice_chart",
    "save_bounds_charts",
    "save_counts_chart",
]
