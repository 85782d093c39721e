"""Whether a site is connected: a file in its folder that is touched as long as it is.

A container's health check reads the file's age, without starting Python, and so does the metric
``nufed_site_connected``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from nufed.files import make_private

TOUCH_INTERVAL = 10.0  # seconds
MAX_AGE = 60.0  # seconds since the last poll, or of the file, after which a site is not connected


def health_file(folder: Path, number: int) -> Path:
    return folder / f"connected-{number}"


def is_connected(folder: Path, number: int) -> bool:
    """Whether the site's process has touched its file recently."""
    try:
        return time.time() - health_file(folder, number).stat().st_mtime < MAX_AGE
    except OSError:
        return False


class Health:
    """Touches the file of a site that polls its server, or works on a message of it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._working, self._polled = False, -MAX_AGE
        self._stop = Event()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keeps the file up to date; removes it at the end."""
        thread = Thread(target=self._keep_up_to_date, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            self._file.unlink(missing_ok=True)

    def polled(self) -> None:
        """The server has answered."""
        self._polled = time.monotonic()

    @contextmanager
    def working(self) -> Iterator[None]:
        """A message is being answered, which may take long."""
        self._working = True
        try:
            yield
        finally:
            self._working = False
            self.polled()

    def update(self) -> None:
        """Touch the file if the site is connected."""
        if self._working or time.monotonic() - self._polled < MAX_AGE:
            with suppress(OSError):  # the site does not need it
                make_private(self._file.parent)
                self._file.touch(mode=0o600)

    def _keep_up_to_date(self) -> None:
        while not self._stop.wait(TOUCH_INTERVAL):
            self.update()
