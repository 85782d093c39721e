"""How runs and downloads show that they are alive: a live line in a terminal, else plain lines."""

from __future__ import annotations

import logging
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

from nufed.data.download import OnProgress
from nufed.experiment import Event
from nufed.runs import Config
from nufed.runs.trust import named_code
from nufed.terminal import words
from nufed.text import visible

SHOWN = 5  # warnings of a run that are shown; the others are counted


class Display:
    """Follows a run and estimates the time left from what each method's rounds took so far."""

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
        self._spent: dict[str, list[float]] = {}
        self.resume: str | None = None  # the command that resumes the run

    def start(self, config: Config, path: Path) -> None:
        """A run begins in ``path``."""
        self._config = config
        self.resume = f"nufed run --resume {path}" + " --trust" * bool(named_code(config))
        self._methods = list(config.algorithms())
        self._rounds = {method: len(config.seeds) * config.rounds for method in self._methods}
        self._console.print(words(f"run directory: {path}"), soft_wrap=True)
        self._bar.start()
        self._task = self._bar.add_task("", total=sum(self._rounds.values()), left="")
        self._last = time.monotonic()

    def update(self, event: Event) -> None:
        """A round is done (round 0: a method begins)."""
        now = time.monotonic()
        if event.round:
            self._spent.setdefault(event.method, []).append(now - self._last)
        self._last = now
        left = self._left()
        score = "" if event.score is None else f"  {event.score:.3f}"
        where = f"seed {event.seed}  {event.method}"
        if event.method in self._rounds:
            where += f"  round {event.round}/{self._config.rounds}"
        done = sum(map(len, self._spent.values()))
        self._bar.update(self._task, completed=done, description=visible(where) + score, left=left)
        plain = not self._console.is_terminal
        if plain and event.round and event.round in (self._config.rounds // 2, self._config.rounds):
            self._console.print(words(f"{where}{score}  {left}"), soft_wrap=True)

    def stop(self) -> None:
        self._bar.stop()

    def _left(self) -> str:
        """Rounds still to do, at each method's own pace (unknown yet: the slowest known)."""
        pace = {m: sum(s) / len(s) for m, s in self._spent.items()}
        if not pace:
            return ""
        slowest = max(pace.values())
        seconds = sum(
            (rounds - len(self._spent.get(m, ()))) * pace.get(m, slowest)
            for m, rounds in self._rounds.items()
        )
        return (
            f"about {seconds / 60:.1f} min left" if seconds > 90 else f"about {seconds:.0f} s left"
        )


class _FirstWarnings(logging.Handler):
    """Prints the first warnings of a run above its progress, and counts the others."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console, self._number = console, 0

    def emit(self, record: logging.LogRecord) -> None:
        self._number += 1
        if self._number <= SHOWN:
            self._say(f"warning: {record.getMessage()}")

    def say_the_rest(self) -> None:
        if self._number > SHOWN:
            more = self._number - SHOWN
            self._say(f"{more} more such warnings; metrics.jsonl and the report name the updates")

    def _say(self, text: str) -> None:
        self._console.print(words(f"nufed: {text}"), soft_wrap=True)


@contextmanager
def show_progress(console: Console) -> Iterator[Display]:
    """A display that leaves the terminal as it was, whatever happens.

    It also shows the first few warnings of the log, as of updates left out, and counts the others.
    """
    display, log, warned = Display(console), logging.getLogger("nufed"), _FirstWarnings(console)
    log.addHandler(warned)
    try:
        yield display
    finally:
        display.stop()
        log.removeHandler(warned)
        warned.say_the_rest()


@contextmanager
def show_download(console: Console, name: str) -> Iterator[OnProgress]:
    """A function to call with the bytes so far and in all; plain lines come every tenth."""
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
            console.print(words(f"{name}: {done / 1e6:.1f}{of} MB"), soft_wrap=True)
        shown = tenth

    with bar:
        yield update
