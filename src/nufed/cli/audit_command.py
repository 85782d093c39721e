"""The command ``nufed federate audit``: parsing and printing only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nufed.cli.terminal import say


def audit(
    run: Annotated[Path, typer.Argument(help="A federation's run directory.")],
    head: Annotated[
        str | None,
        typer.Option(help="A head that was noted earlier: it must still be in the log."),
    ] = None,
) -> None:
    """Verify the audit log of a run, or name its first broken line."""
    from nufed.runs.audit_log import AUDIT
    from nufed.runs.audit_log import audit as verify

    found = verify(run / AUDIT, head)
    events = found.events
    span = f" from {events[0]['time']} to {events[-1]['time']}" if events else ""
    say(f"{run / AUDIT}: {len(events)} lines{span}, the chain is intact; head: {found.head}")


def register(app: typer.Typer) -> None:
    app.command()(audit)
