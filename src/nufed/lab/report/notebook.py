"""A run as Python returns it: it displays as its results table, with interactive charts.

In a notebook pages and charts are shown in sandboxed frames, with Vega embedded, so that showing
one fetches nothing and its scripts can't reach the notebook.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from jinja2.utils import htmlsafe_json_dumps

from nufed.errors import InputError, visible
from nufed.lab.report.figures import draw, spec_of
from nufed.lab.report.headline import headline
from nufed.lab.report.tables import Table, all_groups, results_table
from nufed.lab.runs import Run, load_run

PAGE_HEIGHT = 700  # pixels
CHART_HEIGHT, MARGIN = 320, 150  # default height; room for axes and legend


class ShownRun(Run):
    """The contents of a run directory, as :func:`nufed.run` and :func:`nufed.load_run` return them.

    In a notebook it displays as its results table, ``run.figures["accuracy"]`` is an interactive
    chart, and ``run.report()`` shows the report.
    """

    @classmethod
    def of(cls, run: Run) -> ShownRun:
        """A run as shown in notebooks."""
        return cls(**{field.name: getattr(run, field.name) for field in fields(run)})

    def _repr_html_(self) -> str:
        return "\n".join(_html(self))

    @cached_property
    def figures(self) -> Figures:
        """The charts of the report by name, as altair charts; the measure (``"accuracy"``) names
        the curves of the agents seen in training."""
        from nufed.lab.report.charts import all_charts  # altair is slow to import

        if not self.rows():
            raise InputError(f"{self.path} has no scores, and so no charts")
        charts = {name: offline(chart) for name, _, chart in all_charts([self])}
        return Figures({self.measure.name: charts["rounds-seen"], **charts})

    def report(self) -> Page:
        """The report, made again from the run's records; a notebook shows it in place."""
        from nufed.lab.report.run_page import run_page

        page, drawn = run_page([self]).render()
        drawn.warn("the page has tables but lacks charts")
        return Page(page.decode(), self.path / "report.html")


def load(path: str | Path, *, trust: bool = False) -> ShownRun:
    """Read a run directory back.

    A file that violates its schema or digest or contradicts other files is refused and named.

    Args:
        path: the run directory.
        trust: allow importing the algorithms that it names as ``package.module:Class``, if any.
    """
    return ShownRun.of(load_run(path, trust=trust))


class Figures(dict[str, Any]):
    """Charts by name."""

    def __missing__(self, name: str) -> Any:
        raise InputError(f"there is no figure {name!r}: choose one of {', '.join(self)}")

    def __repr__(self) -> str:
        return f"<Figures {', '.join(self)}>"


def _html(run: Run) -> Iterator[str]:
    """Headline, results table of every group, and what could not be trained."""
    yield f"<p>{escape(visible(headline(run)))}</p>"
    for group in all_groups([run]):
        yield from _html_table(f"agents {group} in training", results_table([run], group))
    for line in run.failures:
        yield f"<p>could not be trained, left out above: {escape(visible(line))}</p>"


def _html_table(title: str, table: Table) -> Iterator[str]:
    yield f"<table><caption>{escape(title)}</caption>"
    for tag, rows in (("th", [table.headings]), ("td", table.rows)):
        for row in rows:
            cells = "".join(f"<{tag}>{escape(visible(cell))}</{tag}>" for cell in row)
            yield f"<tr>{cells}</tr>"
    yield "</table>"


def framed(html: str, height: int) -> str:
    """HTML that shows a whole page in a frame."""
    style = f"width: 100%; height: {height}px; border: 0"
    page = escape(html, quote=True)
    return f'<div><iframe sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe></div>'


@dataclass(frozen=True, repr=False)
class Page:
    """A report, which a notebook shows in place; ``path`` is that of the run's own copy."""

    html: str
    path: Path

    def _repr_html_(self) -> str:
        return framed(self.html, PAGE_HEIGHT)

    def __repr__(self) -> str:
        return f"<Page {visible(self.path)}>"


class OfflineChart:
    """Displays an altair chart without fetching Vega from the network.

    If another renderer than altair's default was enabled, that is used.
    """

    def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> Any:
        import altair  # slow to import

        javascript = draw({}, javascript=True).javascript
        if altair.renderers.active != "default" or javascript is None:
            return super()._repr_mimebundle_(*args, **kwargs)  # type: ignore[misc]
        spec = spec_of(self)
        page = (
            f'<!doctype html><meta charset="utf-8"><script>{javascript}</script><div id="chart">'
            f'</div><script>vegaEmbed("#chart", {htmlsafe_json_dumps(spec)}, '
            '{mode: "vega-lite", actions: false})</script>'
        )
        height = spec.get("height", CHART_HEIGHT)
        tall = height if isinstance(height, int) else CHART_HEIGHT
        return {"text/html": framed(page, tall + MARGIN), "text/plain": repr(self)}


def offline(chart: Any) -> Any:
    """The chart as on the page (characters that can't be drawn are escaped), shown offline."""
    made = type(chart).from_dict(spec_of(chart))
    kind = type(made)
    shown = type(kind.__name__, (OfflineChart, kind), {})
    object.__setattr__(made, "__class__", shown)  # altair's copies keep it
    return made
