"""Runs a SuperLink in the foreground."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from nufed.errors import InputError, RunError
from nufed.flower.app.registry import SITES, SITES_VARIABLE
from nufed.flower.logs import LogFormat, relayed
from nufed.flower.ops.flower_processes import Flower, flower, python_module, wait
from nufed.flower.ops.keys import (
    CA,
    CERTIFICATE,
    KEY,
    check_certificate,
    check_server_keys,
    server_expiry,
)
from nufed.flower.ops.link import Link, check_loopback, is_loopback
from nufed.flower.ops.registration import Admission

START_TIMEOUT = 120.0  # seconds
# listening on all addresses -> the address to connect to from here
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def serve(
    host: str,
    port: int,
    keys: Path | None,
    *,
    insecure: bool = False,
    without_proxy: bool = False,
    say: Callable[[str], None] = print,
    log_format: LogFormat = "text",
) -> None:
    """Run a SuperLink until interrupted; it admits only the sites registered in ``keys``.

    It reads the body of a request before it authenticates the sender, and one of its APIs has no
    authentication: it listens beyond loopback only if ``without_proxy`` says so.
    """
    if insecure:
        check_loopback(host, "--host")
        if keys is not None:
            raise InputError("--keys needs encryption: omit --insecure")
    elif keys is None:
        raise InputError(
            "give --keys FOLDER with the server's certificate, which `nufed federate keys FOLDER` "
            "makes (or, on this machine only, --insecure)"
        )
    if not (without_proxy or is_loopback(host)):
        raise InputError(
            f"--host {host}: anyone who reaches this address can run code at every site and use up "
            "the server's memory; keep 127.0.0.1 and put a proxy in front (docs/deployment.md), or "
            "give --without-proxy if a firewall or a proxy elsewhere admits only the sites' API"
        )
    with flower() as commands:
        superlink, link = start_superlink(commands, host, port, keys, log_format=log_format)
        for warning in server_expiry(keys) if keys else ():
            say(warning)
        link.connect(commands)
        admission = Admission(link, commands.home, keys / SITES, say) if keys else None
        if admission:
            admission.apply()
        say(f"the server is ready at {host}:{port}; stop it with Ctrl-C")
        while superlink.poll() is None:
            time.sleep(1)
            if admission:
                admission.keep_applied()
        raise RunError(f"the SuperLink exited (exit code {superlink.returncode}); see its output")


def start_superlink(
    commands: Flower,
    host: str,
    port: int,
    keys: Path | None,
    log: Path | None = None,
    log_format: LogFormat = "text",
) -> tuple[subprocess.Popen[bytes], Link]:
    """Start a SuperLink and wait until it listens; without keys it admits everyone."""
    here = WILDCARDS.get(host, host)
    if keys is not None:
        keys = keys.resolve()
        check_certificate(keys, here.strip("[]"))
        check_server_keys(keys)
    if is_listening(here, port):
        raise InputError(f"--port {port}: already in use, give another port")
    more = {SITES_VARIABLE: str(keys / SITES)} if keys else {}
    superlink = commands.start(
        *superlink_command(host, port, keys),
        log=log,
        more=more,
        relay=lambda line: relayed(line, log_format),
    )
    wait(lambda: is_listening(here, port) or superlink.poll() is not None, START_TIMEOUT)
    if superlink.poll() is not None or not is_listening(here, port):
        raise RunError(f"the SuperLink did not start at {host}:{port}; see {log or 'its output'}")
    return superlink, Link(f"{here}:{port}", keys / CA if keys else None)


def superlink_command(host: str, port: int, keys: Path | None) -> list[str]:
    """The command; with ``keys`` only sites with a registered key are admitted."""
    python, *module = python_module("nufed.flower.ops.server_process")
    command = [python, "-P", *module, "--isolation", "process"]
    command += ["--disable-runtime-dependency-installation", "--host", host, "--port", str(port)]
    if keys is None:
        return [*command, "--insecure"]
    files = {"--ssl-ca-certfile": CA, "--ssl-certfile": CERTIFICATE, "--ssl-keyfile": KEY}
    for option, name in files.items():
        command += [option, str(keys / name)]
    return [*command, "--enable-supernode-auth"]


def is_listening(host: str, port: int) -> bool:
    """Whether a process accepts connections there."""
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=1):
            return True
    except OSError:
        return False
