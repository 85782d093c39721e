"""Runs the commands of `nufed federate` as processes, and finds Flower's that they started."""

import signal
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

from nufed.flower.ops.flower_processes import free_ports, wait
from processes import NUFED, PATIENCE

TIMEOUT = PATIENCE


@contextmanager
def nufed_federate(cwd, *arguments):
    """The command as a process; ``printed()`` is its output so far."""
    log = cwd / f"printed-{len(list(cwd.glob('printed-*')))}"
    with log.open("w") as file:
        command = [*NUFED, "federate", *map(str, arguments)]
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=file,
            stderr=file,
            # background test runs ignore SIGINT, and their children would inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    process.printed = log.read_text
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(TIMEOUT)


def home_of(pid):
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(entry for entry in entries if entry.startswith(b"FLWR_HOME="))


def running(home):
    """The processes with this home, and their commands."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if home in path.read_bytes().split(b"\0"):
                found[int(path.parent.name)] = path.with_name("cmdline").read_text()
    return found


def find(home, name):
    """The process of a command with this home."""
    pid = next((pid for pid, command in running(home).items() if name in command), None)
    assert pid is not None, f"no {name} runs"
    return pid


class Federation:
    """A server and sites as separate processes, which outlive single runs."""

    def __init__(self, folder, stack, sites):
        self.folder, self._stack = folder, stack
        (self.port,) = free_ports(1)
        self.address = ("--server", f"127.0.0.1:{self.port}", "--insecure")
        self.server = None
        self.start_server()
        self.sites = [self.start_site(number) for number in range(sites)]

    def _start(self, *arguments):
        return self._stack.enter_context(nufed_federate(self.folder, *arguments))

    def start_server(self):
        self.server = self._start("server", "--port", self.port, "--insecure")
        ready = wait(lambda: "the server is ready" in self.server.printed(), TIMEOUT)
        assert ready, self.server.printed()

    def start_site(self, number):
        named = ("--number", number, "--name", f"site-{number}")
        return self._start("site", *named, "--folder", f"site-{number}", *self.address)

    def run(self, *arguments):
        return self._start("run", "app", *arguments, *self.address)


def rounds_done(out):
    """The last checkpointed round; -1: none."""
    saved = out.glob("methods/*/seed-*/checkpoint-*.safetensors")
    return max((int(path.stem[-6:]) for path in saved), default=-1)
