"""The command that serves the report of a run in the browser: parsing and printing only."""

from __future__ import annotations

import sys
import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from nufed.cli.bundle_commands import Trust
from nufed.cli.terminal import say

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
    from nufed.runs import RunDirectory
    from nufed.runs.training_state import training_state

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
