"""One HTML page that opens offline: sections of sentences, tables and charts.

A report of runs (``run_page.py``), of a sweep (``sweep_page.py``), of a search (``tune_page.py``)
and of a run in training (``watch.py``) are lists of sections, which ``page.html.j2`` shows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
from markupsafe import Markup

from nufed.errors import RunError, visible
from nufed.lab.report.figures import Chart, Drawn, draw, spec_of
from nufed.lab.report.tables import Table


def _theme(ink: str, faint: str, grid: str, ramp: Sequence[str]) -> dict[str, Any]:
    """A Vega-Lite configuration; the background is that of the page."""
    text = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12}
    return {
        "header": text,
        "axis": {
            **text,
            "labelLimit": 260,
            "gridColor": grid,
            "domainColor": faint,
            "tickColor": faint,
        },
        "legend": {**text, "labelLimit": 0, "orient": "top"},
        "title": {"color": ink},
        "view": {"stroke": grid},
        "range": {"ramp": list(ramp), "heatmap": list(ramp)},
    }


LIGHT = _theme("#1b1b1b", "#888888", "#e2e2e2", ["#ffffff", "#08519c"])
DARK = _theme("#e6e6e6", "#888888", "#3a3d42", ["#1f2329", "#7db8f0"])


@dataclass(frozen=True)
class Text:
    """A paragraph; ``look`` is a class of the style sheet."""

    text: str
    look: str = ""
    id: str = ""


@dataclass(frozen=True)
class Charts:
    """Charts side by side, with their captions."""

    charts: Sequence[Chart]


@dataclass(frozen=True)
class Warned:
    """A highlighted list under a title; left out if it is empty.

    With ``most``, only so many lines are shown with the number of all, and where the ``rest`` is.
    """

    title: str
    lines: Sequence[str]
    most: int | None = None
    rest: str = ""


@dataclass(frozen=True)
class Folded:
    """Shown on a click, or at once if ``open``."""

    summary: str
    blocks: Sequence[Block]
    open: bool = False


@dataclass(frozen=True)
class Code:
    """Lines of code."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Section:
    """Blocks under a heading, if there is one; left out if all of them are empty."""

    title: str
    blocks: Sequence[Block]
    id: str = ""


Block: TypeAlias = str | Text | Table | Charts | Warned | Folded | Code | Section
"""Plain text is a note, in small print; text is escaped, unless it is Markup."""


@dataclass(frozen=True)
class Page:
    """A page: what was found comes first."""

    title: str
    headline: Sequence[Block]
    sections: Sequence[Section]

    def render(self, *, figures: bool = False) -> tuple[bytes, Drawn]:
        """The page in UTF-8, and with ``figures`` its charts as SVG and PNG.

        If drawing fails, the page lacks the missing charts and says so.
        """
        specs = {name: spec_of(chart) for name, _, chart in _charts(self.sections)}
        drawn = draw(specs if figures else {}, javascript=bool(specs))
        html = _template().render(page=self, specs=specs, drawn=drawn)
        return html.encode("utf-8", "backslashreplace"), drawn

    def save(
        self, out: Path, command: str, file: str = "report.html", *, figures: bool = True
    ) -> Path:
        """Write the page and ``figures/`` into ``out``; ``command`` makes them again.

        Missing charts are reported by a :class:`~nufed.errors.ReportWarning`, too.
        """
        html, drawn = self.render(figures=figures)
        try:
            for name, figure in drawn.figures.items():
                figure.save(out / "figures", name)
            out.mkdir(parents=True, exist_ok=True)
            (out / file).write_bytes(html)
        except OSError as error:
            raise RunError(f"the report can't be written to {out}: {error.strerror}") from error
        drawn.warn(f"{out / file} has tables but lacks charts; `{command}` retries")
        return out / file


def note(name: str, **values: object) -> Markup:
    """An explanation of ``notes.toml``, with escaped values."""
    return _filled("notes", name, values)


def caption(name: str, **values: object) -> Markup:
    """A caption of ``notes.toml``, with escaped values."""
    return _filled("captions", name, values)


def _filled(table: str, name: str, values: Mapping[str, object]) -> Markup:
    escaped = {key: visible(value) for key, value in values.items()}
    return Markup(_notes()[table][name].strip()).format(**escaped)


@cache
def _notes() -> dict[str, dict[str, str]]:
    return tomllib.loads((files("nufed.lab.report") / "notes.toml").read_text("utf-8"))


def _charts(blocks: Sequence[Block]) -> Iterator[Chart]:
    for block in blocks:
        if isinstance(block, Charts):
            yield from block.charts
        elif isinstance(block, Section | Folded):
            yield from _charts(block.blocks)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["themes"] = {"light": LIGHT, "dark": DARK}
    environment.filters["kind"] = lambda block: type(block).__name__
    text = (files("nufed.lab.report") / "page.html.j2").read_text("utf-8")
    return environment.from_string(text)


def _finalize(value: Any) -> Any:
    """Escape non-printable characters of text; leave HTML unchanged."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
