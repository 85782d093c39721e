"""The commands ``nufed federate check`` and ``status``: parsing and printing only."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nufed.cli.terminal import print_table, say, table
from nufed.errors import InputError

SERVER = "127.0.0.1:8000"


def check(
    app: Annotated[Path, typer.Argument(help="The app's directory; its code is executed.")],
    data: Annotated[Path | None, typer.Option(help="The site's data, for its app.")] = None,
    number: Annotated[int, typer.Option(min=0, help="The site's number.")] = 0,
) -> None:
    """Try an app on a site's data, without a server: one training step, messages, memory."""
    from nufed.flower.app.check import check_site

    if data is not None and not data.exists():
        raise InputError(f"--data {data}: there is no such file or folder")
    for found in check_site(app, data, number):
        say(str(found))
    say("ok: this site could take part")


def status(
    run: Annotated[
        Path | None, typer.Argument(help="The run directory; default: the newest in runs/.")
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="Instead of a run, show the sites of the server with this folder."),
    ] = None,
    server: Annotated[str, typer.Option(help="The server's HOST:PORT, with --keys.")] = SERVER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a run's state, on the server's machine: sites, round, who was left out and why."""
    if keys is not None:
        if run is not None:
            raise InputError("--keys is instead of a run directory: give one of them")
        _server_status(keys, server, as_json)
        return
    from nufed.flower.ops.status import HEADINGS, has_ended, is_gone, newest_run, site_row, summary
    from nufed.runs.federation_status import read_status

    found = read_status(run or newest_run())
    if as_json:
        over = {"gone": is_gone(found), "ended": has_ended(found)}
        print(json.dumps({**found.model_dump(), **over}, indent=1))
        return
    for line in summary(found):
        say(line)
    print_table(table([site_row(site) for site in found.sites], HEADINGS))


def _server_status(keys: Path, server: str, as_json: bool) -> None:
    from nufed.flower.ops.connected_sites import connected_sites
    from nufed.flower.ops.status import SERVER_HEADINGS, connected_row

    sites = connected_sites(keys, server)
    if as_json:
        print(json.dumps([asdict(site) for site in sites], indent=1))
        return
    say(f"{sum(site.connected for site in sites)} of {len(sites)} registered sites connected")
    print_table(table([connected_row(site) for site in sites], SERVER_HEADINGS))
