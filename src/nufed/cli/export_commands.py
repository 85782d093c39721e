"""``nufed export``: parsing and printing only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nufed.cli.bundle_commands import Trust
from nufed.cli.terminal import say
from nufed.errors import InputError

TARGETS = {  # of nufed.export, with a line for the help text
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
    from nufed.export import Chosen, export_model
    from nufed.export import export as export_run
    from nufed.runs import load_run

    if run.is_file():
        if method is not None or seed is not None:
            raise InputError(f"{run} is one model: leave out --method and --seed")
        for line in export_model(run, to, out, trust=trust):
            say(line)
        return
    finished = load_run(run, trust=trust)
    for line in export_run(finished, to, out, Chosen(method, seed, trust)):
        say(line)


def register(app: typer.Typer) -> None:
    app.command()(export)
