"""Logs why a server refuses a site: once per reason, however often the site tries.

Flower logs such errors and exits. If the server does not know the site's key, or its clock differs,
Flower interrupts its own process instead.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOG = logging.getLogger("nufed")
FLOWER = logging.getLogger("flwr")
NOT_ADMITTED = "it does not admit this site's key, or the clocks of both differ"
_FRAME = ("Exit Code:", "Failed to initialize", "The SuperNode could not", "For more information")


class RefusedConnection:
    """Flower's errors until a connection is made; every try is a process of its own.

    Args:
        file: the reason of the last try.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._errors: list[str] = []
        self._connected = False

    @contextmanager
    def logged_once(self) -> Iterator[RefusedConnection]:
        """Log the errors in one line at the end, unless the last try had the same.

        An interrupt is such an error, and exits with 1; that of a connected site ends the context.
        """
        FLOWER.addFilter(self._collect)
        try:
            yield self
        except KeyboardInterrupt:
            if not self._connected:
                self._errors.append(NOT_ADMITTED)
                sys.exit(1)
        finally:
            FLOWER.removeFilter(self._collect)
            reason = "; ".join(dict.fromkeys(self._errors))
            if reason and reason != self._last():
                self._file.write_text(reason, "utf-8")
                LOG.error("the server refuses this site: %s", reason)

    def clear(self) -> None:
        """The connection is made: errors from now on are logged as they occur."""
        FLOWER.removeFilter(self._collect)
        self._connected = True
        self._errors.clear()
        self._file.unlink(missing_ok=True)

    def _last(self) -> str:
        return self._file.read_text("utf-8") if self._file.exists() else ""

    def _collect(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        self._errors.append(cause(record.getMessage()))
        return False


def cause(message: str) -> str:
    r"""What one of Flower's error messages says beside its frame, on one line.

    >>> cause("Exit Code: 305\nFailed to initialize the connection.\n[code: 1] No such key.\n")
    '[code: 1] No such key.'
    """
    lines = [line.strip() for line in message.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(_FRAME))
