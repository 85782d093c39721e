"""Progress of runs and downloads: a live bar in a terminal, otherwise plain lines."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from nufed.errors import visible
from nufed.lab.cli.terminal import styled
from nufed.lab.config import Config
from nufed.lab.config.trust import named_code
from nufed.lab.downloads import OnProgress
from nufed.lab.experiment import Event, Observer

MAX_WARNINGS = 5  # per run; further ones are only counted


class Display(Observer):
    """Shows a run's progress, and its remaining time from each method's past rounds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._spent: dict[str, list[float]] = {}  # seconds of rounds, by method
        self._done: dict[tuple[str, int], int] = {}  # rounds, by method and seed
        self.resume: str | None = None  # the command that resumes the run

    def start(self, config: Config, path: Path) -> None:
        self._config = config
        where = shlex.quote(str(path))
        self.resume = f"nufed run --resume {where}" + " --trust" * bool(named_code(config))
        self._methods = list(config.algorithms())
        self._rounds = {method: len(config.seeds) * config.rounds for method in self._methods}
        self._console.print(styled(f"run directory: {path}"), soft_wrap=True)
        self._bar.start()
        self._task = self._bar.add_task("", total=sum(self._rounds.values()), left="")
        self._last = time.monotonic()

    def part(self, event: Event) -> None:
        self._done[event.method, event.seed] = event.round
        self._show(event)

    def round(self, event: Event) -> None:
        self._spent.setdefault(event.method, []).append(time.monotonic() - self._last)
        self._done[event.method, event.seed] = self._config.rounds if event.last else event.round
        self._show(event)

    def evaluation(self, event: Event) -> None:
        if not event.round:
            self._show(event)

    def _show(self, event: Event) -> None:
        self._last = time.monotonic()
        left = self._left()
        score = ""
        if event.score is not None:  # of an earlier round, where not every round is evaluated
            score = f"  score {event.score:.3f} (round {event.scored_round})"
        where = f"seed {event.seed}  {event.method}"
        if event.method in self._rounds:
            where += f"  round {event.round}/{self._config.rounds}"
        done = sum(self._done.values())
        self._bar.update(self._task, completed=done, description=visible(where) + score, left=left)
        plain = not self._console.is_terminal
        if plain and event.round and (event.last or event.round == self._config.rounds // 2):
            self._console.print(styled(f"{where}{score}  {left}"), soft_wrap=True)

    def stop(self) -> None:
        self._bar.stop()

    def _left(self) -> str:
        """Remaining time, from each method's mean round time (if unknown: the slowest known)."""
        pace = {m: sum(s) / len(s) for m, s in self._spent.items()}
        if not pace:
            return ""
        slowest = max(pace.values())
        seconds = sum(
            (rounds - sum(k for (own, _), k in self._done.items() if own == m))
            * pace.get(m, slowest)
            for m, rounds in self._rounds.items()
        )
        return time_left(seconds)


def time_left(seconds: float) -> str:
    """Remaining time, as text."""
    return f"about {seconds / 60:.1f} min left" if seconds > 90 else f"about {seconds:.0f} s left"


class _FirstWarnings(logging.Handler):
    """Prints the first warnings of a run above its progress, and counts the rest."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console, self._number = console, 0

    def emit(self, record: logging.LogRecord) -> None:
        self._number += 1
        if self._number <= MAX_WARNINGS:
            self._say(f"warning: {record.getMessage()}")

    def print_count(self) -> None:
        if self._number > MAX_WARNINGS:
            more = self._number - MAX_WARNINGS
            self._say(f"{more} more such warnings; metrics.jsonl and the report list the updates")

    def _say(self, text: str) -> None:
        self._console.print(styled(f"nufed: {text}"), soft_wrap=True)


@contextmanager
def show_warnings(console: Console) -> Iterator[None]:
    """Shows the first warnings of the log (for example rejected updates), and counts the rest."""
    log, warned = logging.getLogger("nufed"), _FirstWarnings(console)
    log.addHandler(warned)
    try:
        yield
    finally:
        log.removeHandler(warned)
        warned.print_count()


@contextmanager
def show_progress(console: Console) -> Iterator[Display]:
    """A display that always restores the terminal, and the first warnings of the log."""
    display = Display(console)
    with show_warnings(console):
        try:
            yield display
        finally:
            display.stop()


@contextmanager
def show_download(console: Console, name: str) -> Iterator[OnProgress]:
    """A callback for the bytes received and in total; plain lines are printed every 10 %."""
    bar = Progress(
        TextColumn(name, markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    task = bar.add_task("", total=None)
    shown = -1

    def update(done: int, total: int | None) -> None:
        nonlocal shown
        bar.update(task, completed=done, total=total)
        tenth = 10 * done // (total or 200_000_000)
        if tenth != shown and not console.is_terminal:
            of = f" of {total / 1e6:.1f}" if total else ""
            console.print(styled(f"{name}: {done / 1e6:.1f}{of} MB"), soft_wrap=True)
        shown = tenth

    with bar:
        yield update
