"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nufed.lab.cli.catalogue import complete_override, complete_run, complete_source

Source = Annotated[
    str,
    typer.Argument(
        help="A preset (see `nufed list`) or a TOML file.", autocompletion=complete_source
    ),
]
MaybeSource = Annotated[
    str | None,
    typer.Argument(
        help="A preset (see `nufed list`) or a TOML file.", autocompletion=complete_source
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings as key=value, for example rounds=50 method.adapt_steps=5.",
        autocompletion=complete_override,
    ),
]
FinishedRun = Annotated[
    Path, typer.Argument(help="A finished run directory.", autocompletion=complete_run)
]
Seeds = Annotated[
    int | None, typer.Option(min=1, help="Number of seeds: 0, 1, …; default: as configured.")
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="auto|ADDRESS",
        help="Train on a cluster of Ray: the one of this machine, or of the head at HOST:PORT.",
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Allow importing the code that the file or run names.")
]
NoFigures = Annotated[
    bool, typer.Option("--no-figures", help="Write only the HTML page, no SVG and PNG files.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print machine-readable results.")]
