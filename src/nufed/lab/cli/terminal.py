"""What commands print: untrusted text safely, to standard streams of any kind.

Text is never interpreted as rich markup or an emoji code, and non-printable characters are escaped
(:func:`nufed.errors.visible`). All output of commands except JSON goes through this module. The
streams may have any encoding, be a broken pipe, or end on a full device.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

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


BROKEN_PIPE = 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1  # as shells report it


class OutputError(Exception):
    """A standard stream can't be written. Not an OSError, which handlers of file errors catch."""


@contextmanager
def standard_streams() -> Iterator[None]:
    """Run a command whose standard streams may fail.

    Characters that the encoding lacks are escaped. A broken pipe (``| head``) ends the command
    silently; a full device ends it with a one-line error.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_watched(stream) for stream in streams)
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OutputError as failure:
        error = cast(OSError, failure.__cause__)
        if isinstance(error, BrokenPipeError):
            sys.exit(BROKEN_PIPE)
        say(
            f"error: standard output can't be written ({error.strerror}): redirect it elsewhere",
            error=True,
        )
        sys.exit(2)
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            _discard_unwritable(stream)


class _Watched:
    """A text stream whose write errors raise :class:`OutputError`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text)) or 0

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], int | None]) -> int | None:
        try:
            return act()
        except BrokenPipeError as error:
            raise OutputError from error
        except OSError as error:
            if self._stream is sys.__stderr__:  # progress and warnings are not essential
                return None
            raise OutputError from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _watched(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed: output is discarded
        return cast(TextIO, None)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return cast(TextIO, _Watched(stream))


def _discard_unwritable(stream: TextIO | None) -> None:
    """Discard buffered output that can't be written, or Python reports an error at exit."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        with suppress(OSError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), stream.fileno())
