"""The progress bar of a run in a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from nufed.config import Config
from nufed.errors import visible
from nufed.experiment.observers import Event, Listener, Observer
from nufed.runs import Run

REDRAW_SECONDS = 0.1  # at most so often, as every update is a message to the browser


class NotebookBar(Observer):
    """A bar with the current method, round and score, redrawn in place.

    Args:
        display: IPython's ``display``.
    """

    def __init__(self, display: Any) -> None:
        self._display = display

    def start(self, config: Config, path: Path) -> None:
        self._rounds, self._methods = config.rounds, set(config.algorithms())
        self._total = config.rounds * len(self._methods) * len(config.seeds)
        self._done: dict[tuple[str, int], int] = {}  # rounds by method and seed
        self._text, self._drawn = f"run directory: {path}", time.monotonic()
        self._handle = self._display(self, display_id=True)

    def part(self, event: Event) -> None:
        self.round(event)

    def round(self, event: Event) -> None:
        self._text = f"seed {event.seed}, {event.method}"
        if event.method in self._methods:
            self._done[event.method, event.seed] = self._rounds if event.last else event.round
            self._text += f", round {event.round} of {self._rounds}"
        if event.score is not None:
            self._text += f", {event.score:.3f} in round {event.scored_round}"
        if time.monotonic() > self._drawn + REDRAW_SECONDS:
            self._draw()

    def end(self, run: Run | None) -> None:
        if run is not None:  # parts that were finished before a resume told no rounds
            self._done = {("", 0): self._total}
        self._text = "stopped" if run is None else f"run directory: {run.path}"
        self._draw()

    def _draw(self) -> None:
        self._handle.update(self)
        self._drawn = time.monotonic()

    def _repr_html_(self) -> str:
        done = sum(self._done.values())
        bar = f'<progress value="{done}" max="{self._total}"></progress>'
        return f"{bar} {done / self._total:.0%} {escape(visible(self._text))}"

    def __repr__(self) -> str:
        return f"{sum(self._done.values())} of {self._total} rounds, {visible(self._text)}"


def with_notebook_bar(
    observers: Sequence[Observer], on_progress: Listener | None
) -> list[Observer]:
    """The observers, and in a notebook a bar, unless progress is shown by ``on_progress``."""
    display = None if on_progress else notebook_display()
    return [*observers, *([] if display is None else [NotebookBar(display)])]


def notebook_display() -> Any:
    """IPython's ``display`` inside a notebook; None elsewhere, a terminal's IPython too."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display
