"""The page of ``nufed tune``: one HTML file that opens offline, in the style of reports."""

from __future__ import annotations

from pathlib import Path

from nufed.analysis.tuning_findings import doubts, edges, ranking_notes
from nufed.report.figures import draw, spec_of
from nufed.report.page import save_page, template
from nufed.report.tune_charts import tune_charts
from nufed.report.tune_tables import (
    certainty_table,
    choices_table,
    search_table,
    sensitivity_table,
    trials_table,
    tune_headline,
    work_table,
)
from nufed.runs.tuning_record import TuningRecord

PAGE = "tune.html"


def build_tune_page(record: TuningRecord, out: Path, *, figures: bool = True) -> Path:
    """Write ``tune.html`` and, with ``figures``, its charts as SVG and PNG files into ``out``."""
    charts = list(tune_charts(record))
    specs = {name: spec_of(chart) for name, _, chart in charts}
    drawn = draw(specs if figures else {}, javascript=True)
    captions = [(name, caption) for name, caption, _ in charts]
    page = template("tune.html.j2").render(
        title=f"{record.search.config['name']}, tuned",
        headline=tune_headline(record),
        choices=choices_table(record),
        edges=edges(record),
        doubts=doubts(record),
        sensitivity=sensitivity_table(record),
        certainty=certainty_table(record),
        ranking=ranking_notes(record),
        work=work_table(record),
        trials=trials_table(record),
        search=search_table(record),
        best=captions[:1],
        settings=captions[1:],
        specs=specs,
        drawn=drawn,
    )
    encoded = page.encode("utf-8", "backslashreplace")
    return save_page(encoded, drawn, out, "nufed tune --resume", PAGE)
