"""Runs a site in the foreground, shows whether it is connected, and logs why a server refuses it.

As long as a site is connected, a file in its folder is touched. A container's health check reads
the file's age, without starting Python, and so does the metric ``nufed_site_connected``.

A refusal is logged once per reason, however often the site tries. Flower logs such errors and
exits. If the server does not know the site's key, or its clock differs, Flower interrupts its own
process instead.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import NoReturn

from nufed.errors import InputError, RunError
from nufed.flower.app.site import default_folder
from nufed.flower.logs import LOG, LogFormat
from nufed.flower.ops.approvals import Approvals
from nufed.flower.ops.flower_processes import flower, python_module
from nufed.flower.ops.keys import check_private, link_expiry
from nufed.flower.ops.link import Link, existing_file
from nufed.flower.ops.prometheus import serving, site_metrics
from nufed.lab.files import make_private
from nufed.lab.runs.federation_records import read_activity

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
    r"""The text of one of Flower's framed error messages, on one line.

    >>> cause("Exit Code: 305\nFailed to initialize the connection.\n[code: 1] No such key.\n")
    '[code: 1] No such key.'
    """
    lines = [line.strip() for line in message.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(_FRAME))


FIRST_DELAY, MAX_DELAY = 5, 300  # seconds between two tries to connect; doubled at each


@dataclass(frozen=True)
class SiteOptions:
    """A site's options; its number, from 0, identifies it and never changes."""

    number: int
    key: Path | None  # private; None without encryption
    name: str | None = None
    data: Path | None = None
    folder: Path | None = None  # of its state
    epsilon: float | None = None  # its privacy budget against the server
    any_app: bool = False  # with a key, only approved apps run unless this is set
    log_format: LogFormat = "text"
    metrics_port: int | None = None  # on loopback; None: no metrics

    @property
    def approvals(self) -> Approvals | None:
        """The apps that it may run; None: any."""
        if self.key is None or self.any_app:
            return None
        return Approvals.of_site((self.folder or default_folder()).absolute())

    def config(self) -> dict[str, str | int | float]:
        """Its node config, which its app reads."""
        if self.name is not None and not self.name.isprintable():
            raise InputError(f"--name {self.name!r}: must be printable, without line breaks")
        entries = {
            "partition-id": self.number,
            "epsilon": self.epsilon,
            "name": self.name,
            "data": str(self.data.absolute()) if self.data else None,
            "folder": str(self.folder.absolute()) if self.folder else None,
            "key": str(self.key.absolute()) if self.key else None,  # signs replies
            "log-format": self.log_format if self.log_format != "text" else None,
        }
        return {key: value for key, value in entries.items() if value is not None}


def run_site(site: SiteOptions, link: Link, say: Callable[[str], None] = print) -> None:
    """Run a site until interrupted.

    A restarted server has no record of its sites, and the site's process then exits without an
    error: it is started again, with exponential backoff while the server refuses it, as before its
    key is registered and after it is revoked. A site that was never connected is not.
    """
    if (site.key is None) != (link.ca is None):
        raise InputError(
            "give --key FILE, which `nufed federate key FILE` makes, with --ca; and neither of "
            "them with --insecure"
        )
    if site.key is not None:
        check_private(existing_file(site.key, "--key"))
    if site.data is not None and not site.data.exists():
        raise InputError(f"--data {site.data}: there is no such file or folder")
    if site.epsilon is not None and not 0 < site.epsilon < math.inf:
        raise InputError(f"--epsilon {site.epsilon:g}: must be a number above 0")
    if site.folder is not None:
        make_folder(site.folder)
    for warning in link_expiry(link):
        say(warning)
    if site.approvals and site.approvals.last() is None:
        none = "this site has approved no app, so it runs none: nufed federate approve APP"
        say(none + site.approvals.outdated())
    of = site.folder or default_folder(), site.number
    with (
        serving(site.metrics_port, lambda: site_metrics(read_activity(*of), is_connected(*of))),
        flower() as commands,
    ):
        stay_connected(lambda: commands.start(*site_command(site, link)).wait(), say)


def stay_connected(
    connect: Callable[[], int],
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> NoReturn:
    """Call ``connect`` again and again; it returns 0 after a connection, else why is logged."""
    delay, connected = 0, False
    while True:
        code = connect()
        if code == 0:
            delay, connected = FIRST_DELAY, True
            say(
                f"the server disconnected this site: it was restarted, or it revoked the key; "
                f"rejoining in {delay} seconds, and if refused less and less often, every "
                f"{MAX_DELAY} seconds in the end"
            )
        elif not connected:
            raise RunError(f"the site's process exited (exit code {code}); see its output")
        sleep(delay)
        delay = min(2 * delay, MAX_DELAY)


def site_command(site: SiteOptions, link: Link) -> list[str]:
    """The command of a site's process (:mod:`nufed.flower.ops.site_process`)."""
    connection = {
        "server": link.address,
        "ca": link.ca and str(link.ca),
        "key": site.key and str(site.key.absolute()),
        "approved": site.approvals and str(site.approvals.folder),
        "node_config": site.config(),
    }
    return [*python_module("nufed.flower.ops.site_process"), json.dumps(connection)]


def make_folder(folder: Path) -> None:
    try:
        make_private(folder)
    except OSError as error:
        raise InputError(f"{folder} can't be created ({error.strerror}): give another") from error
