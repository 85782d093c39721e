"""``nufed board``: methods of one's own beside those of docs/board.md."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from nufed.lab.cli.options import AsJson
from nufed.lab.cli.terminal import print_table, say, table

if TYPE_CHECKING:
    from nufed.lab.board import Row

board_app = typer.Typer(
    help="The board: every method, tuned, on every problem (docs/board.md).",
    no_args_is_help=True,
)


@board_app.command("compare")
def compare(
    source: Annotated[str, typer.Argument(help="A TOML file with [methods.NAME].")],
    problem: Annotated[
        str, typer.Option("--on", metavar="PROBLEM", help="The problem, such as heart.")
    ] = "heart",
    as_json: AsJson = False,
) -> None:
    """Search and score methods of your own as the board does, beside its best method."""
    from nufed.lab.board import compare as compare_methods
    from nufed.lab.config.devices import torch_threads

    with torch_threads(1):
        rows = compare_methods(problem, source, lambda text: say(text, error=True))
    if as_json:
        print(json.dumps({row.name: row.record for row in rows}))
        return
    print_table(table([_cells(row) for row in rows], _headings(rows[0]), title=f"board: {problem}"))


def _headings(row: Row) -> list[str]:
    steps = [f"{k} step{'s' * (k != 1)}" for k in row.steps]
    return ["method", *steps, "worst 10 %", "seen", "to the board's best (95 %)"]


def _cells(row: Row) -> list[str]:
    difference = "–"
    if row.place is not None and row.place.interval is not None:
        low, high = row.place.interval
        difference = f"{row.place.difference:+.3g} ({low:+.3g} … {high:+.3g})"
    numbers = [*row.scores, row.worst_tenth, row.seen]
    return [row.name, *(f"{value:.4g}" for value in numbers), difference]
