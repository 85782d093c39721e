"""The command ``nufed submit``: parsing and printing only."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nufed.cli.completion import complete_source
from nufed.cli.data_commands import Overrides
from nufed.cli.terminal import console, say

if TYPE_CHECKING:
    from nufed.experiment.submission import Submission


def submit(
    source: Annotated[
        str,
        typer.Argument(
            help="A preset (see `nufed list`) or a TOML file.", autocompletion=complete_source
        ),
    ],
    out: Annotated[Path, typer.Option(help="The run directory to create, which all nodes share.")],
    overrides: Overrides = None,
    parts: Annotated[int, typer.Option(min=1, help="Number of jobs that train.")] = 16,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    time: Annotated[int, typer.Option(min=1, help="Time limit of a job, in minutes.")] = 60,
    memory: Annotated[
        float | None, typer.Option(min=0.1, help="Memory of a job, in gigabytes.")
    ] = None,
    cpus: Annotated[int, typer.Option(min=1, help="Cores, and worker processes, of a job.")] = 1,
    local: Annotated[
        bool, typer.Option("--local", help="Processes on this machine instead of Slurm; waits.")
    ] = False,
) -> None:
    """Train a run as a job array of Slurm, and collect it in a further job."""
    from nufed.experiment.submission import Resources
    from nufed.experiment.submission import submit as submit_parts

    asked = Resources(partition, time, memory, cpus)
    found = submit_parts(source, overrides or [], out, parts, asked, local=local)
    say(f"{parts} parts of {out} submitted; their output is in {found.logs}")
    if found.collects is not None:
        say(f"job {found.collects} collects them; by hand: {shlex.join(found.command)}")
        return
    _collect(found, out)


def _collect(submitted: Submission, out: Path) -> None:
    """Wait for the processes, then finish what is missing and print the results."""
    from nufed.cli.printed_results import print_files, print_results
    from nufed.cli.progress import show_progress
    from nufed.experiment import resume

    for failed in submitted.wait():
        say(f"warning: {failed}", error=True)
    with show_progress(console(stderr=True)) as display:
        finished = resume(out, trust="--trust" in submitted.command, observers=[display])
    print_results([finished])
    print_files(finished)
    if finished.failures:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.command()(submit)
