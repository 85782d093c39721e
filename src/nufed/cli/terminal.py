"""Safe printing of untrusted text.

Text is never interpreted as rich markup or an emoji code, and non-printable characters are escaped
(:func:`nufed.errors.visible`). All output of commands except JSON goes through this module.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from nufed.errors import visible

WIDE = 10_000  # columns, wider than any table


def say(text: object, *, error: bool = False) -> None:
    """Print one line; ``error``: to stderr, prefixed with ``nufed:``."""
    if error:
        print(f"nufed: {visible(text)}", file=sys.stderr, flush=True)
    else:
        print(visible(text))


def console(*, stderr: bool = False) -> Console:
    """A console that prints strings literally."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def styled(*parts: str | tuple[str, str]) -> Text:
    """A line for a console, from strings and (string, style) pairs."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((visible(text), style) for text, style in pairs))


def wide() -> bool:
    """Whether lines are not broken: standard output is a file or a pipe."""
    return not console().is_terminal


def natural_width(made: Table) -> int:
    """The columns that a table needs."""
    unlimited = Console(width=WIDE)
    return Measurement.get(unlimited, unlimited.options, made).maximum


def print_table(made: Table) -> None:
    """Print a table; to a file or pipe at its full width."""
    if not wide():
        console().print(made)
        return
    full = Console(markup=False, emoji=False, highlight=False, width=natural_width(made))
    with full.capture() as capture:
        full.print(made)
    for line in capture.get().splitlines():
        print(line.rstrip())


def print_plain(text: str) -> None:
    """Print lines for another program, never broken or styled."""
    for line in text.splitlines():
        print(visible(line))


def print_line(*parts: str | tuple[str, str]) -> None:
    """Print a line, broken into several only on a terminal."""
    console().print(styled(*parts), soft_wrap=wide())


def table(
    rows: Sequence[Sequence[str | Text]],
    headings: Sequence[str] = (),
    *,
    title: str | None = None,
    right: bool = False,
    quiet: Collection[int] = (),
    gap: int = 2,
) -> Table:
    """A table without borders; ``right``: right-align all but the first column, ``quiet``: rows to
    dim."""
    made = Table(
        title=None if title is None else styled(title),
        title_justify="left",
        box=None,
        show_header=bool(headings),
        pad_edge=False,
        padding=(0, gap),
    )
    for place, heading in enumerate(headings):
        if right and place:  # numbers are never cut; names are broken if there is no room
            width = max(cell_len(str(row[place])) for row in [headings, *rows])
            made.add_column(styled(heading), justify="right", no_wrap=True, min_width=width)
        else:
            made.add_column(styled(heading), overflow="fold")
    for number, row in enumerate(rows):
        cells = [cell if isinstance(cell, Text) else styled(cell) for cell in row]
        made.add_row(*cells, style="dim" if number in quiet else "")
    return made
