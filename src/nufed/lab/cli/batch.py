"""Many trainings: ``sweep``, ``submit``, ``--part``, ``--ray``; parsing and printing only."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from nufed.errors import InputError, visible
from nufed.lab.cli.bundle_commands import Trust
from nufed.lab.cli.catalogue import complete_source
from nufed.lab.cli.data_commands import AsJson, Overrides
from nufed.lab.cli.terminal import console, print_line, print_table, say, styled, table

if TYPE_CHECKING:
    from nufed.lab.experiment import Event
    from nufed.lab.experiment.array import Share, Submission
    from nufed.lab.experiment.sweeping import SweepStart
    from nufed.lab.runs import Run
    from nufed.lab.runs.sweep_record import Sweep

Part = Annotated[
    str | None,
    typer.Option(
        metavar="K/N",
        help="Train every N-th method and seed, from the K-th, in a directory that N processes "
        "share; `--resume` collects. Default in a Slurm job array: its task; `all`: the whole run.",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="auto|ADDRESS",
        help="Train on a cluster of Ray: the one of this machine, or of the head at HOST:PORT.",
    ),
]


def share_of(part: str | None, out: Path | None, resume: Path | None, tuned: bool) -> Share | None:
    """The part to train; None for the whole run.

    In a job array of Slurm the default is the part of this task, if it is given a directory.
    """
    from nufed.lab.experiment.array import parse_share, slurm_share

    if part is None:
        if out is None or resume is not None:
            return None
        share = slurm_share(os.environ)
        if share is not None:
            number, total = share
            say(
                f"part {number}/{total} of the run, from SLURM_ARRAY_TASK_ID; --part all trains "
                "the whole run",
                error=True,
            )
    elif part == "all":
        return None
    else:
        share = parse_share(part)
    if resume is not None:
        raise InputError(
            "--part and --resume: a part needs the configuration and --out DIR; --resume alone "
            "collects all parts"
        )
    if share is not None and tuned:
        raise InputError(
            "--part and --tuned: search first with `nufed tune`, then train the configuration that "
            "it writes with --part"
        )
    return share


def print_part(run: Run) -> None:
    """What is done of the run so far, and how to collect it."""
    from nufed.lab.config.trust import named_code

    methods = run.config.algorithms()
    done, total = sum(map(len, run.methods.values())), len(methods) * len(run.config.seeds)
    trust = " --trust" if named_code(run.config) else ""
    command = f"nufed run --resume {shlex.quote(str(run.path))}{trust}"
    say(f"this part is done; {done} of {total} methods and seeds of {run.path} are done")
    say(f"when all parts are done, write the report: {command}")


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
    from nufed.lab.experiment.array import Resources
    from nufed.lab.experiment.array import submit as submit_parts

    asked = Resources(partition, time, memory, cpus)
    found = submit_parts(source, overrides or [], out, parts, asked, local=local)
    say(f"{parts} parts of {out} submitted; their output is in {found.logs}")
    if found.collects is not None:
        say(f"job {found.collects} collects them; by hand: {shlex.join(found.command)}")
        return
    _collect(found, out)


def _collect(submitted: Submission, out: Path) -> None:
    """Wait for the processes, then finish what is missing and print the results."""
    from nufed.lab.cli.printed_results import print_files, print_results
    from nufed.lab.cli.progress import show_progress
    from nufed.lab.experiment import resume

    for failed in submitted.wait():
        say(f"warning: {failed}", error=True)
    with show_progress(console(stderr=True)) as display:
        finished = resume(out, trust="--trust" in submitted.command, observers=[display])
    print_results([finished])
    print_files(finished)
    if finished.failures:
        raise typer.Exit(1)


def sweep(
    source: Annotated[
        str | None, typer.Argument(help="A preset (see `nufed list`) or a TOML file.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Keys to sweep as key=a,b,c or key=0..5, and settings of all runs as key=value."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The sweep directory to create.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds: 0, 1, …; default: as configured.")
    ] = None,
    max_runs: Annotated[
        int, typer.Option("--max-runs", min=1, help="Largest number of runs to accept.")
    ] = 100,
    resume: Annotated[Path | None, typer.Option(help="Resume this sweep directory.")] = None,
    ray: Ray = None,
    trust: Trust = False,
    no_figures: Annotated[
        bool, typer.Option("--no-figures", help="Write only HTML pages, no SVG and PNG files.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a configuration for every combination of the values of some keys, and compare the runs.

    Example: nufed sweep quickstart data.dirichlet=0.01,0.1,1 method.adapt_steps=0..5
    """
    from nufed.lab.cli.progress import show_warnings
    from nufed.lab.experiment import resume_sweep
    from nufed.lab.experiment import sweep as run_sweep

    given = [*([source] if source and resume else ()), *(settings or ())]
    if seeds:
        given.append(f"seeds={list(range(seeds))}")
    if source is None and resume is None:
        raise InputError("give a preset (see `nufed list`) or a TOML file, or --resume SWEEP")
    terminal = console(stderr=True)
    display = SweepDisplay(terminal)
    follow: dict[str, Any] = {
        "on_start": display.start,
        "on_progress": display.update,
        "on_stop": lambda: say(
            "stopping after this round; press Ctrl-C again to stop now", error=True
        ),
        "ray": ray,
        "figures": not no_figures,
    }
    with show_warnings(terminal):
        try:
            if resume is not None:
                found = resume_sweep(resume, given, trust=trust, **follow)
            else:
                assert source is not None
                found = run_sweep(source, None, given, out=out, max_runs=max_runs, **follow)
        except KeyboardInterrupt:
            how = f"; resume with: {display.resume}" if display.resume else ""
            say(f"stopped{how}", error=True)
            raise typer.Exit(130) from None
        finally:
            display.stop()
    if as_json:
        print(json.dumps({"directory": str(found.path), **found.to_json()}))
    else:
        _print_sweep(found)
    if found.failures:
        raise typer.Exit(1)


def _print_sweep(found: Sweep) -> None:
    from nufed.lab.report.sweep_page import sweep_groups, sweep_headline, sweep_table

    print_line(sweep_headline(found))
    for group in sweep_groups(found):
        say("")
        shown = sweep_table(found, group, narrow=True)
        title = f"agents {group} in training"
        print_table(table(shown.rows, shown.headings, title=title, right=True, gap=1))
    for line in found.failures:
        print_line(("could not be trained", "red"), f", left out above: {line}")
    say(f"results: {found.path / 'results.csv'}")
    say(f"report: {found.path / 'report.html'}")


class SweepDisplay:
    """Shows the progress of all runs of a sweep, and the remaining time from the work done."""

    def __init__(self, terminal: Console) -> None:
        self._console = terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[left]}"),
            console=terminal,
            disable=not terminal.is_terminal,
            transient=True,
        )
        self._done: dict[tuple[str, str, int], float] = {}  # work by run, method and seed
        self._before = 0.0  # work that was done before a resume
        self.resume: str | None = None  # the command that resumes the sweep

    def start(self, begun: SweepStart) -> None:
        """Called before training."""
        from nufed.lab.experiment.jobs import BASELINE_PART

        where = shlex.quote(str(begun.path))
        self.resume = f"nufed sweep --resume {where}" + " --trust" * begun.names_code
        jobs = [job for job in begun.jobs if job.part.method != BASELINE_PART]
        self._parts = {
            (job.directory.path.name, job.part.method, job.part.seed): (
                job.part.work,
                job.setup.config.rounds,
            )
            for job in jobs
        }
        self._total = sum(work for work, _ in self._parts.values())
        runs = len({run for run, _, _ in self._parts})
        self._console.print(styled(f"sweep directory: {begun.path}"), soft_wrap=True)
        self._console.print(styled(f"{len(self._parts)} parts of {runs} runs to train"))
        self._bar.start()
        self._task = self._bar.add_task("", total=self._total, left="")
        self._began = time.monotonic()

    def update(self, run: str, event: Event) -> None:
        """Called after every round (round 0: a part starts)."""
        from nufed.lab.cli.progress import time_left

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
        where = f"{run}  seed {event.seed}  {event.method}  round {event.round}/{rounds}{score}"
        self._bar.update(self._task, completed=done, description=visible(where), left=left)
        if not self._console.is_terminal and event.round == rounds:
            self._console.print(styled(f"{where}  {left}"), soft_wrap=True)

    def stop(self) -> None:
        self._bar.stop()
