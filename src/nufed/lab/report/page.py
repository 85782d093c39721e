"""The report: one HTML page that opens offline, and every chart as SVG and PNG."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from nufed.errors import InputError, RunError, visible
from nufed.lab.report.bounds_tables import bounds_notes, bounds_tables
from nufed.lab.report.charts import all_charts, bounds_charts
from nufed.lab.report.figures import Drawn, draw, spec_of
from nufed.lab.report.headline import finding, measured
from nufed.lab.report.style import DARK, LIGHT
from nufed.lab.report.tables import (
    agents_table,
    all_groups,
    baseline_notes,
    between_runs,
    costs_table,
    methods_table,
    newcomer_notes,
    over_samples,
    problem_text,
    results_table,
    rounds_table,
    run_name,
    settings_table,
    sites_table,
    without_global,
)
from nufed.lab.runs import Run

# the charts of each part of the page, by how their names begin; others come last
PARTS = {
    "first": ("fits", "by-key-seen"),
    "scores": ("results-seen",),
    "unseen": ("by-key-unseen", "results-unseen", "rounds-unseen"),
    "training": ("rounds-seen", "training-", "steps"),
    "agents": ("agents",),
    "data": ("split",),
}


def build_report(runs: Sequence[Run], out: Path, *, figures: bool | None = True) -> Path:
    """Write ``report.html`` and ``figures/`` for one run, or several side by side, into ``out``.

    Without ``figures`` no SVG and PNG files are drawn, with None no charts at all. If drawing
    fails, the page is written without the missing charts and says so, and a
    :class:`~nufed.errors.ReportWarning` is issued.
    """
    page, drawn = page_of(runs, figures=figures)
    return save_page(page, drawn, out, "nufed report")


def save_page(
    page: bytes, drawn: Drawn, out: Path, command: str, file: str = "report.html"
) -> Path:
    """Write a page and its figures; ``command`` makes them again."""
    try:
        for name, figure in drawn.figures.items():
            figure.save(out / "figures", name)
        out.mkdir(parents=True, exist_ok=True)
        (out / file).write_bytes(page)
    except OSError as error:
        raise RunError(f"the report can't be written to {out}: {error.strerror}") from error
    drawn.warn(f"{out / file} has tables but lacks charts; `{command}` retries")
    return out / file


def page_of(runs: Sequence[Run], *, figures: bool | None = False) -> tuple[bytes, Drawn]:
    """The page in UTF-8, and with ``figures`` its charts as SVG and PNG; with None without any."""
    if len({run.measure.name for run in runs}) > 1:
        scores = ", ".join(f"{run.path.name}: {run.measure.name}" for run in runs)
        raise InputError(f"these runs have different measures ({scores}): compare runs of one")
    if len({run.config.eval_on for run in runs}) > 1:
        raise InputError("these runs have different eval_on: compare runs with the same")
    scored = [run for run in runs if run.rows()]
    charts = list(all_charts(scored)) if scored and figures is not None else []
    bounds = runs[0].bounds() if len(runs) == 1 else None
    bounded = list(bounds_charts(bounds)) if bounds and figures is not None else []
    specs = {name: spec_of(chart) for name, _, chart in (*charts, *bounded)}
    drawn = draw(specs if figures else {}, javascript=bool(specs))
    warnings = [w for run in runs for w in run.warnings()]
    page = template("page.html.j2").render(
        title=" and ".join(run_name(run, runs) for run in runs),
        headlines=[(run_name(run, runs) if len(runs) > 1 else "", *_said(run)) for run in runs],
        short=[(group, results_table(runs, group, short=True)) for group in all_groups(runs)],
        between=[(group, *between_runs(runs, group)) for group in all_groups(runs)],
        results=[(group, results_table(runs, group)) for group in all_groups(runs)],
        baselines=baseline_notes(runs[0]),
        newcomers=newcomer_notes(runs),
        without_global=without_global(scored),
        step_sizes_chosen=any(run.step_sizes_chosen for run in runs),
        step_size_notes=list(
            dict.fromkeys(n for r in scored for n in (*r.step_size_notes(), *r.model_notes()))
        ),
        scored_on=runs[0].config.eval_on,
        classes=runs[0].measure.name == "accuracy",
        over_samples=over_samples(runs),
        charts=_by_part([(name, caption) for name, caption, _ in charts]),
        bounds=list(bounds_tables(bounds)) if bounds else [],
        bounds_notes=bounds_notes(bounds) if bounds else [],
        bounds_charts=[(name, caption) for name, caption, _ in bounded],
        specs=specs,
        drawn=drawn,
        settings=[(run_name(run, runs), settings_table(run)) for run in runs],
        methods=methods_table(runs),
        costs=costs_table(runs),
        traffic=[
            (run_name(run, runs), sites, rounds)
            for run in runs
            if (sites := sites_table(run)) and (rounds := rounds_table(run))
        ],
        agents=[(run_name(run, runs), agents_table(run)) for run in scored],
        failures=[line for run in runs for line in run.failures],
        unfinished=[line for run in runs for line in run.unfinished],
        unanswered=[line for run in runs for line in run.unanswered()],
        rejected=[line for run in runs for line in run.rejected()],
        warnings=[str(w) for w in warnings if w.about in ("data", "numbers")],
        below_start=[str(w) for w in warnings if w.about == "training"],
        unscored=[line for run in runs for line in run.unscored()],
    )
    return page.encode("utf-8", "backslashreplace"), drawn


def _said(run: Run) -> tuple[list[Markup], str, str, str]:
    """What was found, what was measured, on which problem, and the configuration's note."""
    groups = all_groups([run]) if run.rows() else []
    found = [_unbroken(finding(run, group)) for group in groups]
    return found, measured(run), problem_text(run), run.config.note


def _unbroken(text: str) -> Markup:
    """The text as HTML, without line breaks between numbers and their units."""
    html = str(escape(visible(text)))
    return Markup(html.replace(" %", "&nbsp;%").replace(" ± ", "&nbsp;±&nbsp;"))


def _by_part(charts: Sequence[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Names and captions of charts by part of the page."""
    found: dict[str, list[tuple[str, str]]] = {part: [] for part in (*PARTS, "more")}
    for name, caption in charts:
        part = next((part for part, starts in PARTS.items() if name.startswith(starts)), "more")
        found[part].append((name, caption))
    if not found["first"]:
        found["first"], found["scores"] = found["scores"], []
    return found


@cache
def template(name: str) -> jinja2.Template:
    """A template of this room; text is escaped in it."""
    folder = files("nufed.lab.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda other: (folder / other).read_text("utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
    )
    environment.globals["themes"] = {"light": LIGHT, "dark": DARK}
    return environment.get_template(name)


def _finalize(value: Any) -> Any:
    """Escape non-printable characters of text; leave HTML unchanged."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
