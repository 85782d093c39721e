"""Progress of training and downloads: a live bar in a terminal, otherwise plain lines."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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
from nufed.lab.experiment.jobs import BASELINE_PART

if TYPE_CHECKING:
    from nufed.lab.experiment.sweeping import SweepStart
    from nufed.lab.tuning import TuneEvent

MAX_WARNINGS = 5  # per run; further ones are only counted
PLAIN_EVERY = 0.1  # share of the work of a search between lines where there is no terminal


class Display:
    """A bar with what is trained and the remaining time; without a terminal, a few plain lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.resume: str | None = None  # the command that resumes, once training has started
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )

    def begin(self, resume: str, total: float, *lines: str) -> None:
        """Print the lines, and show the bar below them."""
        self.resume = resume
        for line in lines:
            self._print(line)
        self._bar.start()
        self._task = self._bar.add_task("", total=total, left="")

    def show(self, done: float, line: str, left: str, plain: str | None = None) -> None:
        """Redraw the bar; without a terminal, print ``plain``, if anything."""
        self._bar.update(self._task, completed=done, description=visible(line), left=left)
        if plain is not None and not self.console.is_terminal:
            self._print(f"{plain}  {left}")

    def stop(self) -> None:
        self._bar.stop()

    def _print(self, line: str) -> None:
        self.console.print(styled(line), soft_wrap=True)


class RunDisplay(Display, Observer):
    """Shows a run's progress, and its remaining time from each method's past rounds."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._spent: dict[str, list[float]] = {}  # seconds of rounds, by method
        self._done: dict[tuple[str, int], int] = {}  # rounds, by method and seed

    def start(self, config: Config, path: Path) -> None:
        self._config = config
        seeds = len(config.seeds)
        self._rounds = {name: seeds * config.rounds_of(name) for name in config.algorithms()}
        resume = f"nufed run --resume {shlex.quote(str(path))}"
        resume += " --trust" * bool(named_code(config))
        self.begin(resume, sum(self._rounds.values()), f"run directory: {path}")
        self._last = time.monotonic()

    def part(self, event: Event) -> None:
        self._done[event.method, event.seed] = event.round
        self._update(event)

    def round(self, event: Event) -> None:
        self._spent.setdefault(event.method, []).append(time.monotonic() - self._last)
        rounds = self._config.rounds_of(event.method)
        self._done[event.method, event.seed] = rounds if event.last else event.round
        self._update(event)

    def evaluation(self, event: Event) -> None:
        if not event.round:
            self._update(event)

    def _update(self, event: Event) -> None:
        self._last, rounds = time.monotonic(), self._config.rounds_of(event.method)
        line = f"seed {event.seed}  {event.method}"
        if event.method in self._rounds:
            line += f"  round {event.round}/{rounds}"
        if event.score is not None:  # of an earlier round, where not every round is evaluated
            line += f"  score {event.score:.3f} (round {event.scored_round})"
        is_told = event.round and (event.last or event.round == rounds // 2)
        self.show(sum(self._done.values()), line, self._left(), line if is_told else None)

    def _left(self) -> str:
        """Remaining time, from each method's mean round time (if unknown: the slowest known)."""
        pace = {m: sum(s) / len(s) for m, s in self._spent.items()}
        if not pace:
            return ""
        slowest = max(pace.values())
        left = dict(self._rounds)
        for (method, _), rounds in self._done.items():
            if method in left:
                left[method] -= rounds
        return time_left(sum(n * pace.get(method, slowest) for method, n in left.items()))


class SweepDisplay(Display):
    """Shows the progress of all runs of a sweep, and the remaining time from the work done."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._done: dict[tuple[str, str, int], float] = {}  # work by run, method and seed
        self._before = 0.0  # work that was done before a resume

    def start(self, begun: SweepStart) -> None:
        """Called before training."""
        self._parts = {
            (job.directory.path.name, job.part.method, job.part.seed): (
                job.part.work,
                job.setup.config.rounds_of(job.part.method),
            )
            for job in begun.jobs
            if job.part.method != BASELINE_PART
        }
        self._total = sum(work for work, _ in self._parts.values())
        runs = len({run for run, _, _ in self._parts})
        self.begin(
            f"nufed sweep --resume {shlex.quote(str(begun.path))}" + " --trust" * begun.names_code,
            self._total,
            f"sweep directory: {begun.path}",
            f"{len(self._parts)} parts of {runs} runs to train",
        )
        self._began = time.monotonic()

    def update(self, run: str, event: Event) -> None:
        """Called after every round (round 0: a part starts)."""
        part = (run, event.method, event.seed)
        if part not in self._parts or not event.round:
            return
        work, rounds = self._parts[part]
        if part not in self._done:
            self._before += work * (event.round - 1) / rounds
        self._done[part] = work * event.round / rounds
        done = sum(self._done.values())
        spent = time.monotonic() - self._began
        left = time_left(spent * (self._total - done) / (done - self._before))
        score = "" if event.score is None else f"  {event.score:.3f}"
        line = f"{run}  seed {event.seed}  {event.method}  round {event.round}/{rounds}{score}"
        self.show(done, line, left, line if event.round == rounds else None)


class TuneDisplay(Display):
    """Shows the progress of a search; without a terminal, a line for every tenth of the work."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._shown = 0.0

    def start(self, path: Path) -> None:
        self.begin(f"nufed tune --resume {shlex.quote(str(path))}", 1.0, f"directory: {path}")

    def update(self, event: TuneEvent) -> None:
        trial = event.trial
        seed = f" seed {trial.seed}" if event.stage == "repeats" else ""
        best = ", ".join(f"{name} {score:.3g}" for name, score in event.best.items())
        done = f"{event.trials} trials done" + (f"  best {best}" if best else "")
        line = f"{done}  trial {trial.number} {trial.method}{seed}"
        plain = None
        if event.share >= self._shown + PLAIN_EVERY:
            self._shown, plain = event.share, f"{event.share:.0%}  {done}"
        left = "" if event.left is None else time_left(event.left)
        self.show(event.share, f"{line}  round {event.round}/{event.rounds}", left, plain)


class PilotDisplay(Display):
    """Shows what a pilot does, and how much of its time is over."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar.start()
        self._task = self._bar.add_task("", total=1.0, left="")
        self._shown = 0.0

    def update(self, what: str, share: float) -> None:
        plain = None
        if share >= self._shown + PLAIN_EVERY:
            self._shown, plain = share, f"{share:.0%} of the time  {what}"
        self.show(share, what, "", plain)


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


DisplayT = TypeVar("DisplayT", bound=Display)


@contextmanager
def shown(display: DisplayT) -> Iterator[DisplayT]:
    """A display that always restores the terminal; above it the first warnings of the log (for
    example rejected updates), of which the rest is counted."""
    log, warned = logging.getLogger("nufed"), _FirstWarnings(display.console)
    log.addHandler(warned)
    try:
        yield display
    finally:
        display.stop()
        log.removeHandler(warned)
        warned.print_count()


def show_progress(console: Console) -> AbstractContextManager[RunDisplay]:
    """Shows the progress of a run to which the display is given as an observer."""
    return shown(RunDisplay(console))


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
