"""Flower's SuperLink, of which other users of the machine can use only the sites' API.

Flower's Control API (starts runs, which execute code) and Runtime API (tasks of ServerApps) have no
authentication in flwr 1.41. Here they accept only connections from this machine whose socket, by
the kernel's table, belongs to a process of the same user. ServerApps are started by this process,
each with its token in an anonymous file instead of its command line.

Run as a module, with the options of `flower-superlink`; it never imports torch. Flower looks up a
module of extensions; this module takes its place.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from ipaddress import ip_address
from logging import getLogger
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from nufed.flower.internals import next_server_app, run_superlink

LOG = getLogger("flwr")
OPEN_PATHS = ("/v1/fleet/", "/health")  # sites authenticate with keys
TASK_POLL_INTERVAL = 0.3  # seconds
REFUSED = "Refused: this API is for processes of the server's own user on its machine.\n"
ESTABLISHED = "01"  # a closed connection is listed with user 0


class OwnUserOnly:
    """Refuses requests from other users and other machines, but for the sites' API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not scope["path"].startswith(OPEN_PATHS):
            owner = owner_of(scope["client"], scope["server"])
            if owner != os.geteuid():
                await PlainTextResponse(REFUSED, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def owner_of(client: tuple[str, int] | None, server: tuple[str, int] | None) -> int | None:
    """The user whose process holds the other end of a connection; None if unknown or elsewhere."""
    if client is None or server is None:
        return None
    ends = [kernel_address(*client), kernel_address(*server)]
    table = Path("/proc/self/net/tcp6" if ":" in client[0] else "/proc/self/net/tcp")
    for line in table.read_text().splitlines()[1:]:
        entry = line.split()
        if entry[1:3] == ends and entry[3] == ESTABLISHED:
            return int(entry[7])
    return None


def kernel_address(host: str, port: int) -> str:
    """An address as in /proc/self/net/tcp: words of 32 bits in the machine's byte order."""
    packed = ip_address(host).packed
    step = -1 if sys.byteorder == "little" else 1
    words = [packed[start : start + 4][::step].hex() for start in range(0, len(packed), 4)]
    return f"{''.join(words)}:{port:04x}".upper()


def get_middleware() -> tuple[Middleware, ...]:
    """Flower's hook: the outermost middleware of all APIs."""
    return (Middleware(OwnUserOnly),)


def get_lifespan_contexts() -> tuple[Callable[[Any], AbstractAsyncContextManager[None]], ...]:
    """Flower's hook: what runs as long as the server."""
    return (_starting_server_apps,)


@asynccontextmanager
async def _starting_server_apps(app: Any) -> AsyncIterator[None]:
    polling = asyncio.create_task(_start_server_apps(app.state))
    try:
        yield
    finally:
        polling.cancel()


async def _start_server_apps(state: Any) -> None:
    """Start the ServerApp of every run that is submitted."""
    started: list[subprocess.Popen[bytes]] = []
    while True:
        try:
            submitted = await next_server_app(state)
            if submitted is not None:
                started.append(_start_server_app(*submitted))
        except Exception:  # a run fails; the server continues
            LOG.exception("a ServerApp could not be started")
        started = [process for process in started if process.poll() is None]
        await asyncio.sleep(TASK_POLL_INTERVAL)


def _start_server_app(command: list[str], token: str) -> subprocess.Popen[bytes]:
    file = os.memfd_create("token")
    os.write(file, token.encode())
    command = [*command, "--token-file", f"/proc/self/fd/{file}", "--parent-pid", str(os.getpid())]
    discarded = subprocess.DEVNULL  # its log is in the run directory
    try:
        return subprocess.Popen(command, stdout=discarded, stderr=discarded, pass_fds=[file])
    finally:
        os.close(file)


if __name__ == "__main__":
    os.environ["FORWARDED_ALLOW_IPS"] = ""  # else a header could give another client address
    run_superlink(sys.modules["__main__"])
