"""The connection to a SuperLink, and calls of its API.

Keys are registered in this process: ``flwr supernode register`` takes seconds for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import tomli_w

from nufed.errors import InputError, RunError
from nufed.flower.internals import ControlApi, control_api
from nufed.flower.ops.flower_processes import Flower


@contextmanager
def control_of(link: Link) -> Iterator[ControlApi]:
    """A SuperLink's Control API, which answers to the server's own user only."""
    try:
        with control_api(link.address, link.ca.read_bytes() if link.ca else None) as control:
            yield control
    except httpx.HTTPStatusError as error:
        text = " ".join(error.response.text.split())[:300]
        raise RunError(f"the server answered {error.response.status_code}: {text}") from None
    except httpx.HTTPError as error:
        raise RunError(f"the server's Control API can't be reached: {error}") from None


NAME = "nufed"  # the connection's name in Flower's configuration


@dataclass(frozen=True)
class Link:
    """A SuperLink's ``HOST:PORT``, and the CA of its certificate; None: no encryption."""

    address: str
    ca: Path | None

    @property
    def options(self) -> str:
        """The command-line options that give this link."""
        return f"--server {self.address} " + (f"--ca {self.ca}" if self.ca else "--insecure")

    def connect(self, flower: Flower) -> None:
        """Configure ``flwr`` to use this SuperLink."""
        how = {"root-certificates": str(self.ca)} if self.ca else {"insecure": True}
        text = tomli_w.dumps({"superlink": {NAME: {"address": self.address, **how}}})
        (flower.home / "config.toml").write_text(text, "utf-8")


def link_to(server: str, ca: Path | None, insecure: bool) -> Link:
    """The link to ``server`` (``HOST:PORT``), checked."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"--server {server}: must be HOST:PORT, as 127.0.0.1:8000")
    if insecure:
        check_loopback(host, "--server")
        if ca is not None:
            raise InputError("--ca and --insecure exclude each other: give one of them")
        return Link(server, None)
    if ca is None:
        raise InputError(
            "give --ca ca.crt, the CA of the server's certificate (or, on this machine only, "
            "--insecure)"
        )
    return Link(server, existing_file(ca, "--ca"))


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_loopback(host: str, option: str) -> None:
    """Refuse unencrypted connections beyond this machine."""
    if not is_loopback(host):
        raise InputError(
            f"{option} {host}: --insecure has neither encryption nor authentication and is for "
            "127.0.0.1 only; make certificates with `nufed federate keys` and omit --insecure"
        )


def existing_file(path: Path, option: str) -> Path:
    """The absolute path of an existing file."""
    if not path.is_file():
        raise InputError(f"{option} {path}: there is no such file")
    return path.resolve()


def flwr_json(flower: Flower, *command: str) -> dict[str, Any]:
    """The JSON output of a ``flwr`` command; raises with its error message."""
    _, printed = flower.call("flwr", *command, "--format", "json")
    try:
        answer: dict[str, Any] = json.loads(printed[printed.index("{") :])
    except ValueError:
        raise RunError(error_message(printed)) from None
    if not answer.get("success"):
        raise RunError(error_message(str(answer.get("error-message", printed))))
    return answer


def error_message(printed: str) -> str:
    """The error message at the end of a Flower command's output, on one line."""
    boxed = [line.strip("│ ") for line in printed.splitlines() if line.startswith("│")]
    text = " ".join(boxed) or printed.strip().rpartition("\n\n")[2]
    return " ".join(text.split())[:300] or "it printed nothing"
