"""How commands print: text of any origin comes out as text.

Nothing in it is taken for rich's markup or an emoji code, and what does not print is written out
(:func:`nufed.text.visible`). Commands print through this module only, but for JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nufed.text import visible


def say(text: object, *, error: bool = False) -> None:
    """Print one line; ``error``: to stderr, as what nufed has to say."""
    if error:
        print(f"nufed: {visible(text)}", file=sys.stderr, flush=True)
    else:
        print(visible(text))


def console(*, stderr: bool = False) -> Console:
    """A console that takes strings as they are."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def words(*parts: str | tuple[str, str]) -> Text:
    """A line of text for a console, made of text and of pairs of text and its style."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((visible(text), style) for text, style in pairs))


def table(
    rows: Sequence[Sequence[str | Text]],
    headings: Sequence[str] = (),
    *,
    title: str | None = None,
    right: bool = False,
    quiet: Collection[int] = (),
    gap: int = 2,
) -> Table:
    """A table without lines; ``right``: numbers after the first column, ``quiet``: dim rows."""
    made = Table(
        title=None if title is None else words(title),
        title_justify="left",
        box=None,
        show_header=bool(headings),
        pad_edge=False,
        padding=(0, gap),
    )
    for place, heading in enumerate(headings):
        numbers = right and place > 0
        made.add_column(words(heading), justify="right" if numbers else "left", no_wrap=right)
    for number, row in enumerate(rows):
        cells = [cell if isinstance(cell, Text) else words(cell) for cell in row]
        made.add_row(*cells, style="dim" if number in quiet else "")
    return made
