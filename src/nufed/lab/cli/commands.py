"""The command line: all commands, their examples, and how errors are printed."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Annotated, Any

import typer
from rich.text import Text

from nufed import __version__
from nufed.errors import NufedError
from nufed.lab.cli import bundle_commands, result_commands, training_commands
from nufed.lab.cli.catalogue import catalogue, complete_listed, listing_of
from nufed.lab.cli.data_commands import data_app
from nufed.lab.cli.federate import federate_app
from nufed.lab.cli.options import AsJson
from nufed.lab.cli.terminal import console, print_table, say, standard_streams, styled, table
from nufed.lab.cli.training_commands import board_app
from nufed.theory import TheoryError

app = typer.Typer(
    help="Meta federated learning: one model that is good after ν fine-tuning steps.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app, name="data")
app.add_typer(board_app, name="board")
app.add_typer(federate_app, name="federate")
for command in (
    bundle_commands.bundle,
    bundle_commands.inspect,
    bundle_commands.adapt,
    bundle_commands.predict,
    result_commands.export,
    training_commands.sweep,
    result_commands.watch,
    training_commands.tune,
    training_commands.submit,
    training_commands.run,
    result_commands.report,
    result_commands.bounds,
    result_commands.advise,
):
    app.command()(command)


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
    "advise": (
        "nufed advise mine.toml  (before training: which method, ν and step sizes)",
        "nufed advise sensors rounds=300 --minutes 5",
        "nufed advise runs/quickstart-001 --max-steps 20",
    ),
    "list": (
        "nufed list",
        "nufed list presets",
        "nufed list ditto",
    ),
    "board compare": (
        "nufed board compare mine.toml",
        "nufed board compare mine.toml --on sensors --json",
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
add_examples(board_app, "board ")


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
