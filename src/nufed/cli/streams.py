"""Standard streams of the command line: any encoding, broken pipes, full devices."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from nufed.cli.terminal import say

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
