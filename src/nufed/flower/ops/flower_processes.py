"""Starts Flower's commands, and always terminates them and their descendants."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import IO, TypeAlias

from nufed.errors import InputError, RunError

BIN = Path(sys.executable).parent
Relay: TypeAlias = Callable[[str], str | None]
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
# prctl(PR_SET_PDEATHSIG): the kernel terminates the command if this process dies, even by SIGKILL;
# if it has died before that, the command is not started. Arguments: its PID, then the command.
LAUNCH = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)


class Flower:
    """Flower's commands with their own FLWR_HOME, which identifies all their descendants."""

    def __init__(self, home: Path) -> None:
        from nufed.flower import SETTINGS

        self.home = home
        self._environment = {
            **os.environ,
            **SETTINGS,
            "FLWR_HOME": str(home),
            "PATH": os.pathsep.join(
                (str(BIN), os.environ.get("PATH", ""))
            ),  # for Flower's subprocesses
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        *command: str,
        log: Path | None = None,
        more: Mapping[str, str] | None = None,
        relay: Relay | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command; its output is shown, or appended to ``log``.

        ``more`` is added to its environment. ``relay`` changes every line of its output; None
        leaves the line out.
        """
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid())]
        with (log or Path(os.devnull)).open("ab") as file:
            process = subprocess.Popen(
                [*launcher, str(BIN / command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if relay else file if log else None,
                stderr=subprocess.STDOUT if log or relay else None,
                env={**self._environment, **(more or {})},
                start_new_session=True,  # only this process gets Ctrl-C; it ends the others
            )
        self._started.append(process)
        if relay:
            Thread(target=_pass_on, args=(process.stdout, log, relay), daemon=True).start()
        return process

    def call(self, *command: str, seconds: float = 300) -> tuple[int, str]:
        """Run a command to completion or timeout; returns its exit code and output."""
        with tempfile.NamedTemporaryFile(dir=self.home, suffix=".log") as log:
            process = self.start(*command, log=Path(log.name))
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            return code, Path(log.name).read_text("utf-8", "replace")

    def end(self) -> None:
        """Terminate what was started, then kill every remaining process with this home."""
        for process in self._started:
            with suppress(ProcessLookupError):
                process.terminate()
        wait(lambda: all(each.poll() is not None for each in self._started), GRACE)
        if not wait(lambda: not self._kill(), GRACE):
            raise RunError(f"processes {self.alive()} can't be killed: inspect them with `ps`")
        for process in self._started:
            process.wait()

    def alive(self) -> list[int]:
        """PIDs of the processes with this home; some of Flower's detach from their parents."""
        entry, pids = f"FLWR_HOME={self.home}".encode(), []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is not ours
                if entry in file.read_bytes().split(b"\0"):
                    pids.append(int(file.parent.name))
        return pids

    def _kill(self) -> list[int]:
        pids = self.alive()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids


@contextmanager
def flower() -> Iterator[Flower]:
    """Flower's commands within a context; SIGTERM and SIGHUP act as Ctrl-C."""
    if not Path("/proc/self/environ").exists():
        raise InputError(
            "`nufed federate` needs Linux's /proc, which this system lacks: start "
            "flower-superlink, flower-supernode and flwr as in docs/deployment.md"
        )
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # not those ignored under nohup or &
    handled = [each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, _interrupt) for each in handled}
    try:
        with tempfile.TemporaryDirectory(prefix="nufed-", ignore_cleanup_errors=True) as home:
            commands = Flower(Path(home))
            try:
                yield commands
            finally:
                for each in handled:  # a second Ctrl-C must not leave processes behind
                    signal.signal(each, signal.SIG_IGN)
                commands.end()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition became true before the timeout."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def python_module(name: str) -> tuple[str, ...]:
    """The start of a command that runs a module of nufed."""
    return Path(sys.executable).name, "-m", name


def free_ports(number: int) -> list[int]:
    """Free TCP ports of this machine."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _pass_on(output: IO[bytes], log: Path | None, relay: Relay) -> None:
    """Pass the lines of a process on until it ends; it must never wait for a full pipe."""
    with output, log.open("a", encoding="utf-8") if log else nullcontext(sys.stdout) as file:
        for raw in output:
            line = relay(raw.decode("utf-8", "replace"))
            if line is not None:
                with suppress(OSError, ValueError):  # nobody reads it, or the disk is full
                    file.write(f"{line}\n")
                    file.flush()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
