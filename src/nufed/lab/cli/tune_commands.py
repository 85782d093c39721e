"""The command ``nufed tune``: parsing and printing only."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from nufed.errors import InputError, visible
from nufed.lab.cli.batch import Ray
from nufed.lab.cli.bundle_commands import Trust
from nufed.lab.cli.data_commands import AsJson, Overrides
from nufed.lab.cli.terminal import console, say, styled, table

if TYPE_CHECKING:
    from nufed.lab.report.tables import Table
    from nufed.lab.tuning import TuneEvent, Tuning

PLAIN_EVERY = 0.1  # share of the work between lines where there is no terminal

Budget = Annotated[
    float | None,
    typer.Option(help="Gradients per method, in full trainings by the cheapest; default: 50."),
]
Per = Annotated[
    str | None,
    typer.Option(help="What --budget counts: gradient, or trial (as many for every method)."),
]


def tune_command(
    source: Annotated[
        str | None, typer.Argument(help="A preset (see `nufed list`) or a TOML file.")
    ] = None,
    overrides: Overrides = None,
    budget: Budget = None,
    per: Per = None,
    out: Annotated[Path | None, typer.Option(help="The directory to create.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the search in this directory.")
    ] = None,
    bounds: Annotated[
        Path | None,
        typer.Option(help="A run with `nufed bounds` results: ranges of step sizes end at 2/L."),
    ] = None,
    ray: Ray = None,
    trust: Trust = False,
    no_figures: Annotated[
        bool, typer.Option("--no-figures", help="Write only the HTML page, no SVG and PNG files.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Search the settings of every method with the same budget, on validation samples.

    Example: nufed tune sinusoid --budget 50, then nufed run runs/sinusoid-tune-001/tuned.toml
    """
    from nufed.lab.runs.json_files import finite

    settings = list(overrides or ())
    if resume is not None and source is not None and "=" in source:
        settings, source = [source, *settings], None
    found = tune_and_show(
        source,
        settings,
        budget=budget,
        per=per,
        out=out,
        resume=resume,
        bounds=bounds,
        trust=trust,
        ray=ray,
        figures=not no_figures,
    )
    if as_json:
        print(json.dumps({"directory": str(found.path), **finite(found.record.record())}))
        return
    print_tuning(found)


def tune_and_show(source: str | None, overrides: list[str], **how: Any) -> Tuning:
    """Search with a progress bar; Ctrl-C ends it gracefully and says how to resume."""
    from nufed.lab.tuning import tune

    with _display(console(stderr=True)) as display:
        try:
            return tune(
                source,
                overrides,
                on_start=display.start,
                on_progress=display.update,
                on_stop=lambda: say(
                    "stopping after this round; press Ctrl-C again to stop now", error=True
                ),
                **how,
            )
        except KeyboardInterrupt:
            where = display.path
            how_on = (
                f"; resume with: nufed tune --resume {shlex.quote(str(where))}" if where else ""
            )
            say(f"stopped{how_on}", error=True)
            raise typer.Exit(130) from None


def print_tuning(found: Tuning) -> None:
    """The choices, and what else the search tells."""
    from nufed.lab.analysis.tuning_findings import doubts, edges, ranking_notes
    from nufed.lab.report.tune_page import choices_table, sensitivity_table, tune_headline

    record, terminal = found.record, console()
    terminal.print(styled(tune_headline(record)))
    terminal.print()
    _print(terminal, "choices", choices_table(record))
    terminal.print()
    _print(terminal, "score lost by a factor of 3", sensitivity_table(record))
    for line in (*ranking_notes(record), *doubts(record)):
        terminal.print(styled(line))
    for edge in edges(record):
        terminal.print(styled(("at the edge of its range", "yellow"), f", {edge}; widen it with:"))
        say(f"  {edge.command}")
    say(f"configuration: {found.path / 'tuned.toml'}")
    say(f"page: {found.path / 'tune.html'}")


def _print(terminal: Console, title: str, shown: Table) -> None:
    terminal.print(table(shown.rows, shown.headings, title=title, gap=1))


class _Display:
    """Shows the progress of a search: a bar in a terminal, otherwise a line for every tenth."""

    def __init__(self, bar: Progress, terminal: Console) -> None:
        self.path: Path | None = None
        self._bar, self._terminal = bar, terminal
        self._task = bar.add_task("", total=1.0, left="")
        self._shown, self._last = 0.0, time.monotonic()

    def start(self, path: Path) -> None:
        self.path = path
        self._terminal.print(styled(f"directory: {path}"), soft_wrap=True)
        self._bar.start()

    def update(self, event: TuneEvent) -> None:
        trial = event.trial
        what = f"trial {trial.number} {trial.method}" + (
            f" seed {trial.seed}" if event.stage == "repeats" else ""
        )
        best = ", ".join(f"{name} {score:.3g}" for name, score in event.best.items())
        words = [f"{event.trials} trials done", f"best {best}" if best else ""]
        said = "  ".join(word for word in words if word)
        line = f"{said}  {what}  round {event.round}/{event.rounds}"
        left = _left(event.left)
        self._bar.update(self._task, completed=event.share, description=visible(line), left=left)
        if not self._terminal.is_terminal and event.share >= self._shown + PLAIN_EVERY:
            self._shown = event.share
            self._terminal.print(styled(f"{event.share:.0%}  {said}  {left}"), soft_wrap=True)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"about {seconds / 60:.1f} min left" if seconds > 90 else f"about {seconds:.0f} s left"


@contextmanager
def _display(terminal: Console) -> Iterator[_Display]:
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[left]}"),
        console=terminal,
        disable=not terminal.is_terminal,
        transient=True,
    )
    try:
        yield _Display(bar, terminal)
    finally:
        bar.stop()


def tune_first(source: str | None, settings: list[str], **how: Any) -> str:
    """For ``nufed run --tuned``: search, and give the path of the tuned configuration."""
    if source is None:
        raise InputError("--tuned needs a preset or a TOML file: it can't be given with --resume")
    found = tune_and_show(source, settings, **how)
    say(f"tuned: {found.path / 'tuned.toml'} (page: {found.path / 'tune.html'})", error=True)
    return str(found.path / "tuned.toml")


def register(app: typer.Typer) -> None:
    """Add the command to ``nufed``."""
    app.command("tune")(tune_command)
