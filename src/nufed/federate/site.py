"""A SuperNode, in the foreground."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nufed.errors import InputError, RunError
from nufed.federate.link import Link, existing
from nufed.federate.processes import flower, free_ports
from nufed.runs.durable import make_private

PAUSE = 5  # seconds, in which the server gets its keys


@dataclass(frozen=True)
class Site:
    """Which site this is: its number, from 0, is what it is known by and stays the same."""

    number: int
    key: Path | None  # private; None without encryption
    name: str | None = None
    data: Path | None = None
    folder: Path | None = None  # where it keeps its own state
    epsilon: float | None = None  # the most privacy that it spends against the server

    def config(self) -> str:
        """What the site's app is told, in Flower's words."""
        texts = {
            "name": self.name,
            "data": self.data and self.data.absolute(),
            "folder": self.folder and self.folder.absolute(),
        }
        words = [f"partition-id={self.number}"]
        if self.epsilon is not None:
            words.append(f"epsilon={float(self.epsilon)!r}")
        words += [f"{key}={quoted(str(value), key)}" for key, value in texts.items() if value]
        return " ".join(words)


def attend(site: Site, link: Link, say: Callable[[str], None] = print) -> None:
    """Take part in a federation until it is interrupted.

    A server that was started again knows none of its sites, and Flower's SuperNode then ends
    without an error: it is started again too, also if the server does not have its key yet.
    """
    if (site.key is None) != (link.ca is None):
        raise InputError(
            "give --key FILE, which `nufed federate key FILE` makes, with --ca; and neither of "
            "them with --insecure"
        )
    if site.key is not None:
        existing(site.key, "--key")
    if site.data is not None and not site.data.exists():
        raise InputError(f"--data {site.data}: there is no such file or folder")
    if site.epsilon is not None and not 0 < site.epsilon < math.inf:
        raise InputError(f"--epsilon {site.epsilon:g}: must be a number above 0")
    if site.folder is not None:
        make_folder(site.folder)
    with flower() as commands:
        took_part = False
        while True:
            (port,) = free_ports(1)
            code = commands.start(*supernode_command(site, link, port)).wait()
            took_part = took_part or code == 0
            if not took_part:
                raise RunError(f"the SuperNode ended (exit code {code}); its output says why")
            say(f"the server no longer knows this site; joining again in {PAUSE} seconds")
            time.sleep(PAUSE)


def supernode_command(site: Site, link: Link, port: int) -> list[str]:
    """The command; ``port`` is where the site's own processes meet, on this machine only."""
    command = ["flower-supernode", "--superlink", link.address, "--port", str(port)]
    command += ["--node-config", site.config()]
    if link.ca is None:
        return [*command, "--insecure"]
    command += ["--root-certificates", str(link.ca)]
    if site.key is not None:
        command += ["--auth-supernode-private-key", str(site.key.absolute())]
    return command


def make_folder(folder: Path) -> None:
    try:
        make_private(folder)
    except OSError as error:
        raise InputError(f"{folder} can't be created ({error.strerror}): give another") from error


def quoted(text: str, what: str) -> str:
    """A text as Flower's configurations take it."""
    if "'" in text or not text.isprintable():
        raise InputError(f"{what} {text!r}: must be without ' and without line breaks")
    return f"'{text}'"
