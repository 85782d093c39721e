"""The report: one HTML page that opens offline, and every chart as SVG and PNG."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import jinja2
import vl_convert

from nufed.errors import InputError, RunError
from nufed.report.charts import all_charts
from nufed.report.tables import (
    baseline_notes,
    costs_table,
    headline,
    methods_table,
    results_table,
    settings_table,
)
from nufed.runs import Run


def build_report(runs: Sequence[Run], out: Path) -> Path:
    """Write ``report.html`` and ``figures/`` for one run, or several side by side, into ``out``."""
    if len({run.measure.name for run in runs}) > 1:
        scores = ", ".join(f"{run.path.name}: {run.measure.name}" for run in runs)
        raise InputError(f"these runs are scored differently ({scores}): compare runs of one kind")
    charts = list(all_charts(runs))
    page = _template().render(
        title=" and ".join(run.path.name for run in runs),
        headlines=[headline(run) for run in runs],
        results=[(group, results_table(runs, group)) for group in runs[0].groups],
        baselines=baseline_notes(runs[0]),
        one_seed=any(len(run.config.seeds) == 1 for run in runs),
        charts=[(name, caption) for name, caption, _ in charts],
        specs={name: json.loads(chart.to_json()) for name, _, chart in charts},
        settings=[(run.path.name, settings_table(run)) for run in runs],
        methods=methods_table(runs),
        costs=costs_table(runs),
        rejected=[line for run in runs for line in run.rejected()],
        script=_javascript(),
    )
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for name, _, chart in charts:
            svg = vl_convert.vegalite_to_svg(chart.to_json())
            (out / "figures" / f"{name}.svg").write_text(svg, "utf-8")
            (out / "figures" / f"{name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=2))
        (out / "report.html").write_text(page, "utf-8")
    except OSError as error:
        raise RunError(f"the report can't be written to {out}: {error.strerror}") from error
    return out / "report.html"


@cache
def _javascript() -> str:
    """Vega with everything it needs, so that the page opens offline."""
    return vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string((files("nufed.report") / "page.html.j2").read_text("utf-8"))
