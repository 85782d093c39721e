"""Runs a SuperNode in the foreground."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nufed.errors import InputError, RunError
from nufed.files import make_private
from nufed.flower.ops.flower_processes import flower, free_ports
from nufed.flower.ops.link import Link, existing_file

RETRY_DELAY = 5  # seconds; the server may register keys in the meantime


@dataclass(frozen=True)
class SiteOptions:
    """A site's options; its number, from 0, identifies it and never changes."""

    number: int
    key: Path | None  # private; None without encryption
    name: str | None = None
    data: Path | None = None
    folder: Path | None = None  # of its state
    epsilon: float | None = None  # its privacy budget against the server

    def config(self) -> str:
        """The node config, in Flower's syntax."""
        texts = {
            "name": self.name,
            "data": self.data and self.data.absolute(),
            "folder": self.folder and self.folder.absolute(),
        }
        entries = [f"partition-id={self.number}"]
        if self.epsilon is not None:
            entries.append(f"epsilon={float(self.epsilon)!r}")
        entries += [f"{key}={quoted(str(value), key)}" for key, value in texts.items() if value]
        return " ".join(entries)


def run_site(site: SiteOptions, link: Link, say: Callable[[str], None] = print) -> None:
    """Run a site until interrupted.

    A restarted server has no record of its sites, and Flower's SuperNode then exits without an
    error: it is restarted too, also while its key is not registered yet.
    """
    if (site.key is None) != (link.ca is None):
        raise InputError(
            "give --key FILE, which `nufed federate key FILE` makes, with --ca; and neither of "
            "them with --insecure"
        )
    if site.key is not None:
        existing_file(site.key, "--key")
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
                raise RunError(f"the SuperNode exited (exit code {code}); see its output")
            say(f"the server lost this site's registration; rejoining in {RETRY_DELAY} seconds")
            time.sleep(RETRY_DELAY)


def supernode_command(site: SiteOptions, link: Link, port: int) -> list[str]:
    """The command; ``port`` is for the site's own processes, on this machine only."""
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
    """A string quoted for Flower's config syntax."""
    if "'" in text or not text.isprintable():
        raise InputError(f"{what} {text!r}: must contain neither ' nor line breaks")
    return f"'{text}'"
