"""Pages and charts inside a notebook: in sandboxed frames, with Vega embedded, so that showing one
fetches nothing and its scripts can't reach the notebook."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import altair
from jinja2.utils import htmlsafe_json_dumps

from nufed.errors import visible
from nufed.lab.report.figures import draw, spec_of

PAGE_HEIGHT = 700  # pixels
CHART_HEIGHT, MARGIN = 320, 150  # default height; room for axes and legend


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
    made = altair.Chart.from_dict(spec_of(chart))
    kind = type(made)
    shown = type(kind.__name__, (OfflineChart, kind), {})
    object.__setattr__(made, "__class__", shown)  # altair's copies keep it
    return made
