"""A SuperLink, in the foreground."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from nufed.errors import InputError, RunError
from nufed.federate.keys import CA, CERTIFICATE, KEY, check_certificate
from nufed.federate.link import Link, check_loopback, existing, register
from nufed.federate.processes import Flower, flower, wait

START = 120.0  # seconds until a SuperLink that does not listen is given up
ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # all addresses, and how this machine reaches them


def serve(
    host: str,
    port: int,
    keys: Path | None,
    site_keys: Sequence[Path] = (),
    *,
    insecure: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Run a SuperLink until it is interrupted; only sites with these public keys get in."""
    if insecure:
        check_loopback(host, "--host")
        if keys is not None or site_keys:
            raise InputError("--keys and --site-key need encryption: leave --insecure out")
    elif keys is None:
        raise InputError(
            "give --keys FOLDER with the server's certificate, which `nufed federate keys FOLDER` "
            "makes (or, on this machine alone, --insecure)"
        )
    public = [existing(path, "--site-key") for path in site_keys]
    with flower() as commands:
        superlink, link = start_superlink(commands, host, port, keys)
        if public:
            link.connect(commands)
            register(commands, public)
        say(f"the server is ready at {host}:{port}; Ctrl-C ends it")
        code = superlink.wait()
        raise RunError(f"the SuperLink ended (exit code {code}); its output says why")


def start_superlink(
    commands: Flower, host: str, port: int, keys: Path | None, log: Path | None = None
) -> tuple[subprocess.Popen[bytes], Link]:
    """A SuperLink that listens, and how this machine reaches it; without keys it is open to all."""
    here = ANY.get(host, host)
    if keys is not None:
        keys = keys.resolve()
        check_certificate(keys, here.strip("[]"))
    if listens(here, port):
        raise InputError(f"--port {port}: another process listens there, give another port")
    superlink = commands.start(*superlink_command(host, port, keys), log=log)
    wait(lambda: listens(here, port) or superlink.poll() is not None, START)
    if superlink.poll() is not None or not listens(here, port):
        said = f"{log} says why" if log else "its output says why"
        raise RunError(f"the SuperLink did not start at {host}:{port}; {said}")
    return superlink, Link(f"{here}:{port}", keys / CA if keys else None)


def superlink_command(host: str, port: int, keys: Path | None) -> list[str]:
    """The command; only sites with a registered key get in, unless there are no ``keys``."""
    command = ["flower-superlink", "--disable-runtime-dependency-installation"]
    command += ["--host", host, "--port", str(port)]
    if keys is None:
        return [*command, "--insecure"]
    files = {"--ssl-ca-certfile": CA, "--ssl-certfile": CERTIFICATE, "--ssl-keyfile": KEY}
    for option, name in files.items():
        command += [option, str(keys / name)]
    return [*command, "--enable-supernode-auth"]


def listens(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=1):
            return True
    except OSError:
        return False
