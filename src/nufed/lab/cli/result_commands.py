"""The commands on finished runs: ``report``, ``bounds``, ``advise``, ``watch`` and ``export``."""

from __future__ import annotations

import json
import sys
import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from nufed.errors import InputError
from nufed.lab.cli.catalogue import complete_bounds, complete_run
from nufed.lab.cli.options import AsJson, FinishedRun, NoFigures, Trust
from nufed.lab.cli.terminal import console, print_plain, say, styled

POLL_SECONDS = 0.5  # between checks whether a run has started


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
    from nufed.lab.report.analysis_tables import bounds_notes, bounds_tables
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


def advise(
    run: FinishedRun,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Largest number of fine-tuning steps to try.")
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Advise on number and size of fine-tuning steps and amount of data, from held-out agents."""
    from nufed.lab.analysis.advise import write_advice
    from nufed.lab.cli.printed_results import print_notes
    from nufed.lab.report.analysis_tables import advice_notes, advice_tables
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
    training_state(RunDirectory(run).existing(), trust=trust)  # errors are shown before serving
    from nufed.lab.report.watch import WatchedPage, WatchServer  # altair is slow to import

    with WatchServer(WatchedPage(run, trust), port) as server:
        say(f"watching {run} at {server.url} (Ctrl-C stops watching; the run continues)")
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
    base: Annotated[
        str | None,
        typer.Option(help="Of a model whose base model is elsewhere: the folder of that model."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Write a finished run, or a model, for other tools. Nothing is sent anywhere.

    Examples: nufed export runs/quickstart-001 --to parquet; nufed export mine.safetensors --to onnx
    """
    from nufed.lab.export import Chosen, export as export_run, export_model
    from nufed.lab.runs import load_run

    if run.is_file():
        if method is not None or seed is not None:
            raise InputError(f"{run} is one model: leave out --method and --seed")
        for line in export_model(run, to, out, trust=trust, base=base):
            say(line)
        return
    finished = load_run(run, trust=trust)
    for line in export_run(finished, to, out, Chosen(method, seed, trust)):
        say(line)
