"""The command line: parsing and printing only."""

from __future__ import annotations

import json
import sys
import time
import warnings
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from nufed import __version__
from nufed.errors import InputError, NufedError
from nufed.lab.cli import batch, bundle_commands, tune_commands
from nufed.lab.cli.bundle_commands import Trust
from nufed.lab.cli.catalogue import (
    catalogue,
    complete_bounds,
    complete_listed,
    complete_run,
    complete_source,
    listing_of,
)
from nufed.lab.cli.data_commands import AsJson, Overrides, data_app
from nufed.lab.cli.federate import federate_app
from nufed.lab.cli.terminal import (
    console,
    print_plain,
    print_table,
    say,
    standard_streams,
    styled,
    table,
)
from nufed.theory import TheoryError

POLL_SECONDS = 0.5  # between looks for a run that is yet to start


def watch(
    run: Annotated[
        Path, typer.Argument(help="A run directory: finished, still training or yet to start.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 0,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the page in your browser.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Serve a run's report on this machine, redrawn while it trains; Ctrl-C ends only this.

    If the directory does not exist yet, it waits for the run to start.

    Example: nufed watch runs/quickstart-001
    """
    from nufed.lab.runs import RunDirectory
    from nufed.lab.runs.read_run import training_state

    if not run.exists():
        say(f"waiting for a run to start in {run}, which does not exist yet (Ctrl-C ends it)")
        sys.stdout.flush()
        try:
            while not (run / "run.json").exists():  # the last file of a start
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            say("stopped watching")
            return
    training_state(RunDirectory(run).existing(), trust=trust)  # an error is said at once
    from nufed.lab.report.watch import WatchedPage, WatchServer  # altair is slow to import

    with WatchServer(WatchedPage(run, trust), port) as server:
        say(f"watching {run} at {server.url} (Ctrl-C ends it; the run goes on)")
        sys.stdout.flush()
        if open_browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped watching")


TARGETS = {  # of nufed.lab.export, with a line for the help text
    "tensorboard": "event files, into RUN/tensorboard",
    "mlflow": "a local tracking store, ./mlruns",
    "wandb": "offline W&B runs, into ./wandb",
    "csv": "every final score, and the curves by round, as CSV files",
    "parquet": "the same as Parquet files",
    "onnx": "a model with its preprocessing, also of a bundle or adapted model",
    "state_dict": "a model's parameters as safetensors, and its classes as JSON",
}
TO = "; ".join(f"{name}: {about}" for name, about in TARGETS.items())


def export(
    run: Annotated[
        Path, typer.Argument(help="A finished run directory; or a bundle or adapted model.")
    ],
    to: Annotated[str, typer.Option(help=TO)],
    out: Annotated[
        Path | None, typer.Option(help="Where to write; each target has its own default.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="The method, for targets that write one model.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Its seed; default: the first.")] = None,
    trust: Trust = False,
) -> None:
    """Write a finished run, or a model, for other tools. Nothing is sent anywhere.

    Examples: nufed export runs/quickstart-001 --to parquet; nufed export mine.safetensors --to onnx
    """
    from nufed.lab.export import Chosen, export_model
    from nufed.lab.export import export as export_run
    from nufed.lab.runs import load_run

    if run.is_file():
        if method is not None or seed is not None:
            raise InputError(f"{run} is one model: leave out --method and --seed")
        for line in export_model(run, to, out, trust=trust):
            say(line)
        return
    finished = load_run(run, trust=trust)
    for line in export_run(finished, to, out, Chosen(method, seed, trust)):
        say(line)


app = typer.Typer(
    help="Meta federated learning: one model that is good after ν fine-tuning steps.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
NoFigures = Annotated[
    bool, typer.Option("--no-figures", help="Write only the HTML page, no SVG and PNG files.")
]

app.add_typer(data_app, name="data")
app.add_typer(federate_app, name="federate")
bundle_commands.register(app)
app.command()(export)
app.command()(batch.sweep)
app.command()(watch)
tune_commands.register(app)
app.command()(batch.submit)


@app.command()
def run(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A preset (see `nufed list`) or a TOML file.", autocompletion=complete_source
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run directory to create.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds: 0, 1, …; default: as configured.")
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
    budget: tune_commands.Budget = None,
    per: tune_commands.Per = None,
    part: batch.Part = None,
    ray: batch.Ray = None,
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
    from nufed.lab.cli.progress import show_progress
    from nufed.lab.experiment import resume as resume_experiment
    from nufed.lab.experiment import run as run_experiment
    from nufed.lab.export import TensorBoard

    settings = [*([source] if source and resume else ()), *(overrides or ())]
    if seeds:
        settings.append(f"seeds={list(range(seeds))}")
    if source is None and resume is None:
        raise InputError("give a preset (see `nufed list`) or a TOML file, or --resume RUN")
    if (budget is not None or per is not None) and not tuned:
        raise InputError("--budget and --per are those of a search: add --tuned")
    if quick and resume:
        raise InputError("--quick is for a new run: a resumed one keeps its null baselines")
    share = batch.share_of(part, out, resume, tuned)
    if tuned:
        search = None if resume else source
        searched = {"budget": budget, "per": per, "figures": not no_figures}
        source, settings = tune_commands.tune_first(search, settings, **searched), []
    if quick:
        settings.append("baselines=[]")
    with show_progress(console(stderr=True)) as display:
        follow: dict[str, Any] = {
            "ray": ray,
            "observers": [display, *([TensorBoard()] if tensorboard else ())],
            "figures": None if quick else not no_figures,
            "on_stop": lambda: _say("stopping after this round; press Ctrl-C again to stop now", 0),
        }
        try:
            if resume is not None:
                finished = resume_experiment(resume, settings, trust=trust, **follow)
            else:
                assert source is not None
                finished = run_experiment(source, settings, out=out, part=share, **follow)
        except KeyboardInterrupt:
            how = f"; resume with: {display.resume}" if display.resume else ""
            how = "; start the same part again to resume it" if share else how
            raise typer.Exit(_say(f"stopped{how}", 130)) from None
    if as_json:
        print(json.dumps({"directory": str(finished.path), **finished.to_json()}))
        return
    if share is not None:
        batch.print_part(finished)
    else:
        print_results([finished])
        print_files(finished)
    if finished.failures:
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="One run directory, or several to compare.", autocompletion=complete_run
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Output directory; required for several runs.")
    ] = None,
    trust: Trust = False,
    no_figures: NoFigures = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the results as CSV.")] = False,
) -> None:
    """Rebuild a run's report, or compare several runs on one page.

    Of an unfinished run, the methods and seeds that are finished are shown.

    Example: nufed report runs/quickstart-00* --out compared --csv > results.csv
    """
    from nufed.lab.cli.printed_results import print_results
    from nufed.lab.config.trust import require_trust
    from nufed.lab.report.result_files import results_csv
    from nufed.lab.report.run_page import build_report
    from nufed.lab.runs.read_run import load_finished

    if as_json and as_csv:
        raise InputError("--json and --csv: give one of them")
    loaded = [load_finished(path, trust=trust) for path in runs]
    for each in loaded:
        require_trust(each.path, each.config, trust)
    if out is None:
        if len(loaded) > 1:
            raise InputError("comparing several runs needs an output directory: give --out DIR")
        out = loaded[0].path
    page = build_report(loaded, out, figures=not no_figures)
    if as_json:
        print(json.dumps([{"directory": str(r.path), **r.to_json()} for r in loaded]))
        return
    if as_csv:
        print_plain(results_csv(loaded))
        return
    print_results(loaded)
    say(f"report: {page}")


@app.command()
def bounds(
    source: Annotated[
        Path,
        typer.Argument(
            help="A run directory, or a TOML file of constants.", autocompletion=complete_bounds
        ),
    ],
    add_to_report: Annotated[
        bool, typer.Option("--report", help="Also add them to the run's report.")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Theoretical guarantees: constants, bounds per ν, allowed step sizes, Theorem 1."""
    from nufed.lab.analysis.bounds import bounds_of_numbers, write_bounds
    from nufed.lab.cli.printed_results import print_notes
    from nufed.lab.report.bounds_tables import bounds_notes, bounds_tables
    from nufed.lab.report.charts import bounds_charts
    from nufed.lab.report.figures import save_figures
    from nufed.lab.report.run_page import build_report
    from nufed.lab.runs import load_run

    if source.is_dir():
        finished = load_run(source, trust=trust)
        with console(stderr=True).status("estimating constants, about half a minute"):
            record = write_bounds(finished, trust=trust)
        if add_to_report:
            build_report([finished], source)
    else:
        record = bounds_of_numbers(source)
    if as_json:
        print(json.dumps(record.record()))
        return
    print_notes(bounds_tables(record), bounds_notes(record))
    if source.is_dir():
        for figure in save_figures(bounds_charts(record), source / "figures"):
            say(f"chart: {figure}")


@app.command("advise")
def advise_on(
    run: Annotated[
        Path, typer.Argument(help="A finished run directory.", autocompletion=complete_run)
    ],
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Largest number of fine-tuning steps to try.")
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Advise on number and size of fine-tuning steps and amount of data, from held-out agents."""
    from nufed.lab.analysis.advise import write_advice
    from nufed.lab.cli.printed_results import print_notes
    from nufed.lab.report.advice_tables import advice_notes, advice_tables
    from nufed.lab.report.charts import advice_charts
    from nufed.lab.report.figures import save_figures
    from nufed.lab.runs import load_run

    finished = load_run(run, trust=trust)
    with console(stderr=True).status("trying") as status:

        def show(what: str, share: float) -> None:
            status.update(styled(f"trying {what}, {share:.0%} done"))

        advice = write_advice(finished, max_steps, show, trust=trust)
    if as_json:
        print(json.dumps(advice.record()))
        return
    print_notes(advice_tables(advice), advice_notes(advice))
    for figure in save_figures(advice_charts(advice), run / "figures"):
        say(f"chart: {figure}")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check Python, torch, processes, memory, disk and data, with advice."""
    from nufed.lab.cli.doctor import examine

    findings = examine()
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        colours = {"ok": "green", "note": "yellow", "problem": "red"}
        rows: list[list[str | Text]] = []
        for finding in findings:
            advice = [Text("\n→ "), styled(finding.advice)] if finding.advice else []
            said = Text.assemble(styled(finding.found), *advice)
            rows.append([styled((finding.state, colours[finding.state])), finding.name, said])
        print_table(table(rows))
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


@app.command("list")
def list_all(
    what: Annotated[
        str | None,
        typer.Argument(
            help="An algorithm, or a kind: presets, aggregations, …",
            autocompletion=complete_listed,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List all names that a configuration accepts, or the settings of an algorithm."""
    contents = catalogue().names if what is None else listing_of(what)
    if as_json:
        print(json.dumps(contents))
        return
    for title, entries in contents.items():
        console().print(styled((title, "bold")))
        print_table(table([["  " + name, line] for name, line in entries.items()]))


EXAMPLES = {  # at the end of help texts
    "run": (
        "nufed run quickstart",
        "nufed run quickstart rounds=50 method.adapt_steps=5 data.dirichlet=0.1 --seeds 3",
        "nufed run quickstart data.source=file data.args.path=mine.csv data.samples_per_agent=20",
        "nufed run --resume runs/quickstart-001",
        "nufed run mine.toml --out runs/mine --part 3/16",
    ),
    "submit": (
        "nufed submit mine.toml --out runs/mine --parts 16 --time 240 --memory 4 --partition cpu",
        "nufed submit quickstart --out runs/try --parts 2 --local",
    ),
    "report": (
        "nufed report runs/quickstart-001",
        "nufed report runs/quickstart-001 runs/quickstart-002 --out compared",
    ),
    "adapt": (
        "nufed adapt runs/quickstart-001/bundles/gmeta-hf.nufed mine.csv --out mine.safetensors",
        "nufed adapt model.nufed mine.csv --label species --steps auto --max-steps 30 "
        "--out mine.safetensors",
        "nufed adapt model.nufed photos --out mine.safetensors  (a folder of images per class)",
    ),
    "predict": (
        "nufed predict mine.safetensors new.csv",
        "nufed predict mine.safetensors new.parquet --out predictions.csv",
    ),
    "bundle": (
        "nufed bundle runs/quickstart-001 --method gmeta-hf --out model.nufed",
        "nufed bundle runs/quickstart-001 --method gmeta-hf --agent 7",
    ),
    "inspect": ("nufed inspect runs/quickstart-001/bundles/gmeta-hf.nufed",),
    "bounds": (
        "nufed bounds runs/quickstart-001 --report",
        "nufed bounds constants.toml",
    ),
    "advise": ("nufed advise runs/quickstart-001", "nufed advise runs/mine --max-steps 20"),
    "list": (
        "nufed list",
        "nufed list presets",
        "nufed list ditto",
    ),
    "data get": (
        "nufed data get cifar10",
        "nufed data get cifar10 --from cifar-10-binary.tar.gz",
    ),
    "data show": ("nufed data show quickstart data.dirichlet=0.1 --out split.svg",),
}


def add_examples(app: typer.Typer, group: str = "") -> None:
    """Append the examples of every command, of a group if any, to its help text."""
    for command in app.registered_commands:
        name = group + str(command.name or getattr(command.callback, "__name__", ""))
        if name in EXAMPLES:
            command.epilog = "\n\n".join(["Examples:", *EXAMPLES[name]])


add_examples(app)
add_examples(data_app, "data ")


def _version(requested: bool) -> None:
    if requested:
        say(f"nufed {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a known error is printed as one sentence, with an exit code."""
    warnings.showwarning = _print_warning
    with standard_streams():
        try:
            app()
        except (NufedError, TheoryError) as error:
            sys.exit(_say(f"error: {error}", 2))


def _print_warning(message: Any, *_: Any, **__: Any) -> None:
    _say(f"warning: {message}", 0)


def _say(text: str, code: int) -> int:
    say(text, error=True)
    return code


if __name__ == "__main__":
    main()
