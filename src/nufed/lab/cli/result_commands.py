"""The commands on finished runs: ``report``, ``bounds``, ``advise``, ``watch`` and ``export``.

``advise`` also takes a configuration: it then asks a pilot which method to start with.
"""

from __future__ import annotations

import json
import sys
import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from nufed.errors import InputError
from nufed.lab.cli.catalogue import (
    complete_advised,
    complete_bounds,
    complete_run,
    complete_source,
)
from nufed.lab.cli.options import AsJson, NoFigures, Overrides, Trust
from nufed.lab.cli.terminal import console, print_line, print_plain, say, styled

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
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CONFIG",
            help="A finished run directory; or, before training, a preset or a TOML file.",
            autocompletion=complete_advised,
        ),
    ],
    overrides: Overrides = None,
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Of a run: largest number of fine-tuning steps to try."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, max=600, help="Of a configuration: time of the pilot; default: 2."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Of a configuration: the JSON file to write; default: in runs/."),
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Of a run, advise on fine-tuning: number and size of steps, amount of data. Of a
    configuration, advise on the method to start with, from a pilot of two minutes.

    Test samples are not read.
    """
    run = Path(source)
    if run.is_dir() or not (run.suffix == ".toml" or _is_preset(source)):
        if overrides or minutes is not None or out is not None:
            raise InputError(
                "key=value, --minutes and --out are for the advice from a configuration, and "
                f"{source} is none: leave them out, or give a preset or a TOML file"
            )
        _advise_on_run(run, max_steps, trust, as_json)
        return
    if max_steps is not None:
        raise InputError("--max-steps is for the advice from a finished run: leave it out")
    _advise_before(source, overrides or [], minutes, out, as_json)


def _is_preset(source: str) -> bool:
    return source in complete_source(source)


def _advise_on_run(run: Path, max_steps: int | None, trust: bool, as_json: bool) -> None:
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


def _advise_before(
    source: str, overrides: list[str], minutes: float | None, out: Path | None, as_json: bool
) -> None:
    """Advice from a pilot: printed, and written as JSON. Ctrl-C ends the pilot early."""
    from nufed.lab.analysis.recommend import board_check, recommend
    from nufed.lab.cli.printed_results import print_numbers
    from nufed.lab.cli.progress import PilotDisplay, shown
    from nufed.lab.pilot import MINUTES, pilot
    from nufed.lab.report.pilot_tables import advice_record, pilot_table, sentences, start_with
    from nufed.lab.runs.directory import new_file
    from nufed.lab.runs.json_files import write_json

    minutes, check = MINUTES if minutes is None else minutes, board_check()
    path = None if out is None else new_file("", "", out)
    with shown(PilotDisplay(console(stderr=True))) as display:
        try:
            record = pilot(
                source,
                overrides,
                minutes=minutes,
                on_progress=display.update,
                standing=check.standing,
            )
        except KeyboardInterrupt:
            say("stopped before anything was measured", error=True)
            raise typer.Exit(130) from None
    advice = recommend(record, check.standing)
    path = path or new_file(f"{record.source}-advice", ".json")
    content = advice_record(record, advice, check).record()
    write_json(path, content)
    if as_json:
        print(json.dumps(content))
        return
    title = f"pilot on {record.source}, {record.measure} after"
    print_numbers(title, pilot_table(record, advice))
    say("")
    for sentence in sentences(record, advice, check):
        print_line(sentence)
    say("")
    print_plain(start_with(record, advice))
    say(f"advice: {path}")


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
