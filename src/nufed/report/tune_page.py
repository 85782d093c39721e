"""The page of ``nufed tune``: one HTML file that opens offline, in the style of reports."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

import jinja2

from nufed.analysis.tuning_findings import doubts, edges, ranking_notes
from nufed.errors import RunError, visible
from nufed.report.figures import draw, spec_of
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
    page = _template().render(
        style=_style(),
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
    try:
        for name, figure in drawn.figures.items():
            figure.save(out / "figures", name)
        (out / PAGE).write_bytes(page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise RunError(f"the page can't be written to {out}: {error.strerror}") from error
    drawn.warn(f"{out / PAGE} has tables but lacks charts")
    return out / PAGE


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: (
            visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
        ),
    )
    return environment.from_string((files("nufed.report") / "tune_page.html.j2").read_text("utf-8"))


@cache
def _style() -> str:
    """The style sheet of reports."""
    text = (files("nufed.report") / "page.html.j2").read_text("utf-8")
    found = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    return found[1] if found else ""
