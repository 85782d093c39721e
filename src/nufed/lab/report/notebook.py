"""A run as Python returns it: it displays as its results table, with interactive charts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nufed.errors import InputError, visible
from nufed.lab.report.headline import headline
from nufed.lab.report.tables import Table, all_groups, results_table
from nufed.lab.runs import Run, load_run

if TYPE_CHECKING:
    from nufed.lab.report.framed import Page


class ShownRun(Run):
    """The contents of a run directory, as :func:`nufed.run` and :func:`nufed.load_run` return them.

    In a notebook it displays as its results table, ``run.figures["accuracy"]`` is an interactive
    chart, and ``run.report()`` shows the report.
    """

    @classmethod
    def of(cls, run: Run) -> ShownRun:
        """The same run."""
        return cls(**{field.name: getattr(run, field.name) for field in fields(run)})

    def _repr_html_(self) -> str:
        return "\n".join(_html(self))

    @cached_property
    def figures(self) -> Figures:
        """The charts of the report by name, as altair charts; the measure (``"accuracy"``) names
        the curves of the agents seen in training."""
        from nufed.lab.report.charts import all_charts  # altair is slow to import
        from nufed.lab.report.framed import offline

        if not self.rows():
            raise InputError(f"{self.path} has no scores, and so no charts")
        charts = {name: offline(chart) for name, _, chart in all_charts([self])}
        return Figures({self.measure.name: charts["rounds-seen"], **charts})

    def report(self) -> Page:
        """The report, made again from the run's records; a notebook shows it in place."""
        from nufed.lab.report.framed import Page
        from nufed.lab.report.page import page_of

        page, drawn = page_of([self])
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
