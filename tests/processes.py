"""Processes of tests: forked ones that may be killed, and who descends from whom."""

import os
import signal
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

from nufed.errors import NufedError, NumericalWarning


def fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, none of which is used
        return os.fork()


class Child:
    """A process forked from this one that calls ``work()``, in a process group of its own.

    Forked, because it need not import torch again. What nufed raises there is its ``error``.
    """

    def __init__(self, work, errors):
        self._errors = errors / f"error-{time.monotonic_ns()}"
        self.pid = fork()
        if self.pid == 0:
            os.setsid()
            os._exit(self._run(work))

    def _run(self, work):
        warnings.simplefilter("ignore", NumericalWarning)  # of a checkpoint cut by a kill
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
        """End it and all its processes, which hold the lock of their run until they are gone."""
        below = descendants(self.pid)
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.pid, signal.SIGKILL)
        wait_for(lambda: not alive(below))

    def wait(self):
        """0, 2 for an error of nufed, 1 for another, or minus the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def error(self):
        return self._errors.read_text() if self._errors.exists() else ""


def children(pid):
    """The processes started by this one that have not ended, from Linux's /proc."""
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
    except OSError:  # it has ended, and has been waited for
        return "Z", 0
    return state, int(parent)


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
