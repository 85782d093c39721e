"""The command that serves the report of a run in the browser: parsing and printing only."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from nufed.cli.bundle_commands import Trust
from nufed.cli.terminal import say


def watch(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or still training.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 0,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the page in your browser.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Serve a run's report on this machine, redrawn while it trains; Ctrl-C ends only this.

    Example: nufed watch runs/quickstart-001
    """
    from nufed.runs import RunDirectory
    from nufed.runs.training_state import training_state

    training_state(RunDirectory(run).existing(), trust=trust)  # an error is said at once
    from nufed.report.watch_server import WatchedPage, WatchServer  # altair is slow to import

    with WatchServer(WatchedPage(run, trust), port) as server:
        say(f"watching {run} at {server.url} (Ctrl-C ends it; the run goes on)")
        sys.stdout.flush()
        if open_browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped watching")


def register(app: typer.Typer) -> None:
    app.command()(watch)
