"""The commands that train: ``run``, ``sweep``, ``tune``, ``submit`` and ``board compare``."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from nufed.errors import InputError
from nufed.lab.cli.catalogue import complete_run
from nufed.lab.cli.options import (
    AsJson,
    MaybeSource,
    NoFigures,
    Overrides,
    Ray,
    Seeds,
    Source,
    Trust,
)
from nufed.lab.cli.terminal import console, print_line, print_table, say, styled, table

if TYPE_CHECKING:
    from nufed.lab.board import Row
    from nufed.lab.cli.progress import DisplayT
    from nufed.lab.experiment.array import Share, Submission
    from nufed.lab.report.tables import Table
    from nufed.lab.runs import Run
    from nufed.lab.runs.sweep_record import Sweep
    from nufed.lab.tuning import Tuning

Part = Annotated[
    str | None,
    typer.Option(
        metavar="K/N",
        help="Train every N-th method and seed, from the K-th, in a directory that N processes "
        "share; `--resume` collects. Default in a Slurm job array: its task; `all`: the whole run.",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(help="Gradients per method, in full trainings by the cheapest; default: 50."),
]
Per = Annotated[
    str | None,
    typer.Option(help="What --budget counts: gradient, or trial (as many for every method)."),
]


def run(
    source: MaybeSource = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run directory to create.")] = None,
    seeds: Seeds = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these methods, such as ditto,fedrep."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Resume this run directory; rounds=N trains longer.", autocompletion=complete_run
        ),
    ] = None,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="Search the settings of every method first.")
    ] = False,
    budget: Budget = None,
    per: Per = None,
    part: Part = None,
    ray: Ray = None,
    trust: Trust = False,
    no_figures: NoFigures = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="No null baselines, no charts: for a first look at training."),
    ] = False,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Write TensorBoard event files into RUN/tensorboard."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train and evaluate every method of a configuration, and write a report."""
    from nufed.lab.cli.printed_results import print_files, print_results
    from nufed.lab.cli.progress import RunDisplay
    from nufed.lab.config.load import only_methods
    from nufed.lab.experiment import resume as resume_experiment, run as run_experiment
    from nufed.lab.export import TensorBoard

    settings = _settings(source, overrides, seeds, resume, "RUN")
    if (budget is not None or per is not None) and not tuned:
        raise InputError("--budget and --per are those of a search: add --tuned")
    if quick and resume:
        raise InputError("--quick is for a new run: a resumed one keeps its null baselines")
    share = _share_of(part, out, resume, tuned)
    chosen: str | dict[str, Any] | None = source
    if methods is not None:
        if source is None or resume is not None:
            raise InputError("--methods is for a new run of a preset or a TOML file")
        names = [name.strip() for name in methods.split(",") if name.strip()]
        chosen = only_methods(source, names)
    if tuned:
        if resume is not None or chosen is None:
            raise InputError(
                "--tuned needs a preset or a TOML file: it can't be given with --resume"
            )
        chosen = _tune_first(chosen, settings, budget, per, not no_figures)
        settings = []
    if quick:
        settings.append("baselines=[]")
    observers = [TensorBoard()] if tensorboard else []
    again = "; start the same part again to resume it" if share else None
    with _following(RunDisplay, again) as display:
        follow: dict[str, Any] = {
            "ray": ray,
            "observers": [display, *observers],
            "figures": None if quick else not no_figures,
            "on_stop": _announce_stop,
        }
        if resume is not None:
            finished = resume_experiment(resume, settings, trust=trust, **follow)
        else:
            assert chosen is not None
            finished = run_experiment(chosen, settings, out=out, part=share, **follow)
    if as_json:
        print(json.dumps({"directory": str(finished.path), **finished.to_json()}))
        return
    if share is not None:
        _print_part(finished)
    else:
        print_results([finished])
        print_files(finished)
    if finished.failures:
        raise typer.Exit(1)


def _settings(
    source: str | None,
    settings: list[str] | None,
    seeds: int | None,
    resume: Path | None,
    resumed: str,
) -> list[str]:
    """All settings: with --resume the first of them is parsed as the source."""
    if source is None and resume is None:
        raise InputError(f"give a preset (see `nufed list`) or a TOML file, or --resume {resumed}")
    first = [source] if source and resume else []
    return [*first, *(settings or ()), *([f"seeds={list(range(seeds))}"] if seeds else ())]


@contextmanager
def _following(
    kind: Callable[[Console], DisplayT], how_to_resume: str | None = None
) -> Iterator[DisplayT]:
    """A display of progress; Ctrl-C ends the command and prints how to resume."""
    from nufed.lab.cli.progress import shown

    with shown(kind(console(stderr=True))) as display:
        try:
            yield display
        except KeyboardInterrupt:
            how = f"; resume with: {display.resume}" if display.resume else ""
            say(f"stopped{how_to_resume or how}", error=True)
            raise typer.Exit(130) from None


def _announce_stop() -> None:
    say("stopping after this round; press Ctrl-C again to stop now", error=True)


def _share_of(part: str | None, out: Path | None, resume: Path | None, tuned: bool) -> Share | None:
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


def _print_part(run: Run) -> None:
    """Print how much of the run is done, and the command that collects it."""
    from nufed.lab.config.trust import named_code

    methods = run.config.algorithms()
    done, total = sum(map(len, run.methods.values())), len(methods) * len(run.config.seeds)
    trust = " --trust" if named_code(run.config) else ""
    command = f"nufed run --resume {shlex.quote(str(run.path))}{trust}"
    say(f"this part is done; {done} of {total} methods and seeds of {run.path} are done")
    say(f"when all parts are done, write the report: {command}")


def sweep(
    source: MaybeSource = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Keys to sweep as key=a,b,c or key=0..5, and settings of all runs as key=value."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The sweep directory to create.")] = None,
    seeds: Seeds = None,
    max_runs: Annotated[
        int, typer.Option("--max-runs", min=1, help="Largest number of runs to accept.")
    ] = 100,
    resume: Annotated[Path | None, typer.Option(help="Resume this sweep directory.")] = None,
    ray: Ray = None,
    trust: Trust = False,
    no_figures: NoFigures = False,
    as_json: AsJson = False,
) -> None:
    """Run a configuration for every combination of the values of some keys, and compare the runs.

    Example: nufed sweep quickstart data.dirichlet=0.01,0.1,1 method.adapt_steps=0..5
    """
    from nufed.lab.cli.progress import SweepDisplay
    from nufed.lab.experiment import resume_sweep, sweep as run_sweep

    given = _settings(source, settings, seeds, resume, "SWEEP")
    with _following(SweepDisplay) as display:
        follow: dict[str, Any] = {
            "on_start": display.start,
            "on_progress": display.update,
            "on_stop": _announce_stop,
            "ray": ray,
            "figures": not no_figures,
        }
        if resume is not None:
            finished = resume_sweep(resume, given, trust=trust, **follow)
        else:
            assert source is not None
            finished = run_sweep(source, None, given, out=out, max_runs=max_runs, **follow)
    if as_json:
        print(json.dumps({"directory": str(finished.path), **finished.to_json()}))
    else:
        _print_sweep(finished)
    if finished.failures:
        raise typer.Exit(1)


def _print_sweep(sweep: Sweep) -> None:
    from nufed.lab.report.sweep_page import sweep_headline, sweep_table
    from nufed.lab.report.tables import all_groups

    print_line(sweep_headline(sweep))
    for group in all_groups(list(sweep.runs.values())):
        say("")
        shown = sweep_table(sweep, group, narrow=True)
        title = f"agents {group} in training"
        print_table(table(shown.rows, shown.headings, title=title, right=True, gap=1))
    for line in sweep.failures:
        print_line(("could not be trained", "red"), f", left out above: {line}")
    say(f"results: {sweep.path / 'results.csv'}")
    say(f"report: {sweep.path / 'report.html'}")


def tune(
    source: MaybeSource = None,
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
    no_figures: NoFigures = False,
    as_json: AsJson = False,
) -> None:
    """Search the settings of every method with the same budget, on validation samples.

    Example: nufed tune sinusoid --budget 50, then nufed run runs/sinusoid-tune-001/tuned.toml
    """
    from nufed.lab.runs.json_files import finite

    settings = list(overrides or ())
    if resume is not None and source is not None and "=" in source:
        settings, source = [source, *settings], None
    tuning = _tune(
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
        print(json.dumps({"directory": str(tuning.path), **finite(tuning.record.record())}))
        return
    _print_tuning(tuning)


def _tune(source: str | dict[str, Any] | None, settings: list[str], **how: Any) -> Tuning:
    """Search with a progress bar."""
    from nufed.lab.cli.progress import TuneDisplay
    from nufed.lab.tuning import tune

    with _following(TuneDisplay) as display:
        return tune(
            source,
            settings,
            on_start=display.start,
            on_progress=display.update,
            on_stop=_announce_stop,
            **how,
        )


def _tune_first(
    source: str | dict[str, Any],
    settings: list[str],
    budget: float | None,
    per: str | None,
    figures: bool,
) -> str:
    """Search for ``nufed run --tuned``; the path of the tuned configuration."""
    tuning = _tune(source, settings, budget=budget, per=per, figures=figures)
    path = tuning.path / "tuned.toml"
    say(f"tuned: {path} (page: {tuning.path / 'tune.html'})", error=True)
    return str(path)


def _print_tuning(tuning: Tuning) -> None:
    """The choices of a search, and its other findings."""
    from nufed.lab.analysis.tuning_findings import edges
    from nufed.lab.report.tune_page import (
        choices_table,
        doubts,
        edge_text,
        ranking_notes,
        sensitivity_table,
        tune_headline,
    )

    record, terminal = tuning.record, console()
    terminal.print(styled(tune_headline(record)))
    terminal.print()
    _print(terminal, "choices", choices_table(record))
    terminal.print()
    _print(terminal, "score lost by a factor of 3", sensitivity_table(record))
    for line in (*ranking_notes(record), *doubts(record)):
        terminal.print(styled(line))
    for edge in edges(record):
        at_edge = ("at the edge of its range", "yellow")
        terminal.print(styled(at_edge, f", {edge_text(edge)}; widen it with:"))
        say(f"  {edge.command}")
    say(f"configuration: {tuning.path / 'tuned.toml'}")
    say(f"page: {tuning.path / 'tune.html'}")


def _print(terminal: Console, title: str, shown: Table) -> None:
    terminal.print(table(shown.rows, shown.headings, title=title, gap=1))


def submit(
    source: Source,
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
    from nufed.lab.experiment.array import Resources, submit as submit_parts

    resources = Resources(partition, time, memory, cpus)
    submitted = submit_parts(source, overrides or [], out, parts, resources, local=local)
    say(f"{parts} parts of {out} submitted; their output is in {submitted.logs}")
    if submitted.collects is not None:
        say(f"job {submitted.collects} collects them; by hand: {shlex.join(submitted.command)}")
        return
    _collect(submitted, out)


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


board_app = typer.Typer(
    help="The board: every method, tuned, on every problem (docs/board.md).",
    no_args_is_help=True,
)


@board_app.command("compare")
def compare(
    source: Annotated[str, typer.Argument(help="A TOML file with [methods.NAME].")],
    problem: Annotated[
        str, typer.Option("--on", metavar="PROBLEM", help="The problem, such as heart.")
    ] = "heart",
    as_json: AsJson = False,
) -> None:
    """Search and score methods of your own as the board does, beside its best method."""
    from nufed.lab.board import compare as compare_methods
    from nufed.lab.config.devices import torch_threads

    with torch_threads(1):
        rows = compare_methods(problem, source, lambda text: say(text, error=True))
    if as_json:
        print(json.dumps({row.name: row.record for row in rows}))
        return
    print_table(
        table(
            [_board_cells(row) for row in rows], _board_headings(rows[0]), title=f"board: {problem}"
        )
    )


def _board_headings(row: Row) -> list[str]:
    steps = [f"{k} step{'s' * (k != 1)}" for k in row.steps]
    return ["method", *steps, "worst 10 %", "seen", "to the board's best (95 %)"]


def _board_cells(row: Row) -> list[str]:
    difference = "–"
    if row.place is not None and row.place.interval is not None:
        low, high = row.place.interval
        difference = f"{row.place.difference:+.3g} ({low:+.3g} … {high:+.3g})"
    numbers = [*row.scores, row.worst_tenth, row.seen]
    return [row.name, *(f"{value:.4g}" for value in numbers), difference]
