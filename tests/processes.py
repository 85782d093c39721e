"""Helpers for processes in tests: forked children to kill, and process trees."""

import os
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

from nufed.errors import NufedError, NumericalWarning

NUFED = [sys.executable, "-m", "nufed"]  # the command in its own process
PATIENCE = 900  # seconds: only what hangs takes as long, however busy the machine is


def can_become(user):
    """Whether this process may become another user: not in a user namespace of its own."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    mapped = any(int(first) <= user < int(first) + int(count) for first, _, count in ranges)
    return os.geteuid() == 0 and mapped


def fork():
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # about threads, which the child does not use
        return os.fork()


class Child:
    """A forked process that calls ``work()``, in its own process group.

    Forked to avoid importing torch again. The message of a nufed exception is its ``error``.
    """

    def __init__(self, work, errors):
        self._errors = errors / f"error-{time.monotonic_ns()}"
        self.pid = fork()
        if self.pid == 0:
            os.setsid()
            os._exit(self._run(work))

    def _run(self, work):
        warnings.simplefilter("ignore", NumericalWarning)  # about a checkpoint truncated by a kill
        try:
            work()
        except NufedError as error:
            self._errors.write_text(str(error))
            return 2
        except BaseException:
            traceback.print_exc()
            return 1
        return 0

    def kill(self):
        """Kill it and its descendants, which hold the run's lock until they exit."""
        below = descendants(self.pid)
        with suppress(ProcessLookupError):  # it has exited
            os.killpg(self.pid, signal.SIGKILL)
        wait_for(lambda: not alive(below))

    def wait(self):
        """The exit code: 0, 2 for a nufed error, 1 for another, or minus the signal number."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def error(self):
        return self._errors.read_text() if self._errors.exists() else ""


def children(pid):
    """The running child processes of ``pid``, from Linux's /proc."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        state, parent = state_and_parent(stat)
        if parent == pid and state != "Z":
            found.add(int(stat.parent.name))
    return found


def descendants(pid):
    below = children(pid)
    return below.union(*map(descendants, below))


def alive(pids):
    return {pid for pid in pids if state_and_parent(Path(f"/proc/{pid}/stat"))[0] != "Z"}


def state_and_parent(stat):
    try:
        state, parent = stat.read_text().rpartition(")")[2].split()[:2]
    except OSError:  # it has exited and was reaped
        return "Z", 0
    return state, int(parent)


def wait_for(condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)
