"""A pool of worker processes: forked on Linux, spawned elsewhere.

A forked child has everything the parent has: the data without a copy, and modules, losses and
metrics that can't be serialised. It must not use more than one thread of torch, whose pools do not
survive a fork. A spawned child is a new interpreter that gets ``work`` serialised; samples and
buffers are in shared memory, everything else is rebuilt. Tasks and results are small; vectors go
through shared memory. ``multiprocessing.set_start_method("spawn")`` spawns on Linux, too.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import multiprocessing
import os
import signal
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from threading import Thread
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from nufed.algorithms.protocol import State
from nufed.errors import NufedError, RunError, TrainingError, UpdateError
from nufed.objective.frozen import release_memory

Layout: TypeAlias = list[tuple[str, int, torch.Size, torch.dtype]]
"""The layout of a state in a buffer: name, byte offset, shape and dtype of each vector."""


def shared_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in memory shared with processes forked from this one.

    Pages are allocated on first write.
    """
    numbers = prod(shape)
    memory = mmap.mmap(-1, max(1, numbers * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=numbers).view(*shape)


def shared_bytes(size: int) -> Tensor:
    """Zero bytes in memory shared with processes forked from this one, or spawned with it."""
    if start_method() == "fork":
        return shared_zeros((size,), torch.uint8)
    zeros = torch.zeros(size, dtype=torch.uint8)
    zeros.share_memory_()  # type: ignore[no-untyped-call]
    return zeros


class Buffer(Protocol):
    """Through what workers exchange states with their parent."""

    size: int

    def write(self, state: State, span: range) -> Any:
        """Make a state readable for the other side; returns what a task or result holds of it."""

    def read(self, layout: Any) -> State:
        """A copy of the state that :meth:`write` was given."""


class SharedBuffer:
    """Shared memory through which processes exchange states."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bytes = shared_bytes(max(size, 64))

    def write(self, state: State, span: range) -> Layout | State:
        """Write a state into a span of bytes and return its layout; if too large, the state."""
        if aligned_bytes(state) > len(span):
            return state
        layout, start = [], span.start
        for name, vector in state.items():
            layout.append((name, start, vector.shape, vector.dtype))
            self._view(layout[-1]).copy_(vector)
            start += aligned_bytes({name: vector})
        return layout

    def read(self, layout: Layout | State) -> State:
        """A copy of the state that :meth:`write` was given."""
        if isinstance(layout, Mapping):
            return layout
        return {entry[0]: self._view(entry).clone() for entry in layout}

    def _view(self, entry: tuple[str, int, torch.Size, torch.dtype]) -> Tensor:
        _, start, shape, dtype = entry
        return self._bytes[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def aligned_bytes(state: State) -> int:
    """The bytes that a state takes in a buffer, each vector aligned to cache lines."""
    return sum(-(-vector.nbytes // 64) * 64 for vector in state.values())


Notify: TypeAlias = Callable[[Any], Any]
Send: TypeAlias = Callable[[tuple[str, Any]], Any]
LOG = logging.getLogger("nufed")


def start_method() -> Literal["fork", "spawn"]:
    """How workers are started: macOS and Windows do not fork safely."""
    spawn = multiprocessing.get_start_method(allow_none=True) == "spawn"
    return "spawn" if spawn or sys.platform != "linux" else "fork"


def unsendable(work: object) -> str | None:
    """Why a spawned process can't get this object; None if it can."""
    try:
        with _hidden_main():
            ForkingPickler.dumps(work)
    except Exception as error:  # objects of the user's may raise anything
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Without the user's script as a module: a child would run it again, from its beginning."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def usable_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_count(name: str) -> int:
    """How many processes can use a device at a time: one each of its type, unless it has an index.

    >>> device_count("cpu"), device_count("cuda:1")
    (1, 1)
    """
    device = torch.device(name)
    if device.type == "cpu" or device.index is not None:
        return 1
    return max(1, torch.get_device_module(device).device_count())


class Pool(Protocol):
    """Workers that perform tasks: processes here (:class:`Workers`) or actors on other machines."""

    def map(
        self,
        tasks: Sequence[Any],
        describe: Callable[[Any, Any], str],
        on_notify: Notify = ...,
        stop: Callable[[list[Any]], bool] | None = None,
    ) -> list[Any]: ...

    @property
    def close(self) -> Callable[[], object]: ...


@dataclass(frozen=True)
class _UsesDevice:
    """Sent to a spawned child before its work, which is then rebuilt on that child's device."""

    device: torch.device
    number: int

    def __reduce__(self) -> tuple[Callable[[str, int], None], tuple[str, int]]:
        return _use_device, (str(self.device), self.number)


def _use_device(name: str, number: int) -> None:
    """Let a device's name without an index mean the one of that number."""
    if device_count(name) > 1:
        torch.get_device_module(name).set_device(number)


class Workers:
    """``count`` processes that call ``work(task, notify)``.

    What a child passes to ``notify`` reaches the parent while the task is still running, and so do
    its records of the logger "nufed". Children end with :meth:`close`, and when the parent dies.

    With a ``device`` other than the CPU, children are spawned, because devices do not survive a
    fork, and each uses another device of that type.
    """

    def __init__(self, count: int, work: Callable[[Any, Notify], Any], device: str = "cpu") -> None:
        self._links: dict[Connection, BaseProcess] = {}
        self._device = torch.device(device)
        self.close = weakref.finalize(self, _end, os.getpid(), self._links)
        release_memory()  # each forked process would get pages of it by using it
        gc.freeze()  # or a collection would write to the pages of all objects, and so copy them
        try:
            for _ in range(count):
                self._start(work)
        except OSError as error:  # too many open files, or processes
            self.close()  # or Python would wait for them at exit
            raise RunError(
                f"{count} worker processes can't be started ({error.strerror}): allow more open "
                "files (`ulimit -n`) and processes (`ulimit -u`), or set workers=1"
            ) from error

    def _start(self, work: Callable[[Any, Notify], Any]) -> None:
        method = start_method() if self._device.type == "cpu" else "spawn"
        context: Any = multiprocessing.get_context(method)
        mine, theirs = context.Pipe()
        inherited = [*self._links, mine] if method == "fork" else []
        process = context.Process(
            target=_serve,
            args=(theirs, inherited, _UsesDevice(self._device, len(self._links)), work),
            kwargs={"threads": torch.get_num_threads()},
            name="nufed worker",
        )
        with warnings.catch_warnings(), _hidden_main() if method == "spawn" else nullcontext():
            # Python warns about forking with threads: a child uses none of the parent's
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self._links[mine] = process

    def map(
        self,
        tasks: Sequence[Any],
        describe: Callable[[Any, Any], str],
        on_notify: Notify = lambda content: None,
        stop: Callable[[list[Any]], bool] | None = None,
    ) -> list[Any]:
        """The results, in the order of the tasks; each task goes to the first idle process.

        An exception of a child is raised here. If a process dies, the error names its task by
        ``describe(task, last notification)``. ``stop(running tasks)`` is polled; where it is true,
        the remaining tasks are abandoned.
        """
        waiting = deque(enumerate(tasks))
        idle, busy = list(self._links), dict[Connection, int]()
        results: list[Any] = [None] * len(waiting)
        last: dict[int, Any] = {}
        while waiting or busy:
            if stop and stop([tasks[number] for number in busy.values()]):
                break
            while waiting and idle:
                link = idle.pop()
                busy[link], task = waiting.popleft()
                try:
                    link.send(task)
                except (BrokenPipeError, ConnectionResetError):
                    raise self._death(link, describe(task, None)) from None
            for ready in wait(list(busy), timeout=0.5 if stop else None):
                assert isinstance(ready, Connection)
                number = busy[ready]
                try:
                    kind, content = ready.recv()
                except (EOFError, OSError):  # also in the middle of a message
                    what = describe(tasks[number], last.get(number))
                    raise self._death(ready, what) from None
                if kind == "result":
                    results[number] = content
                    idle.append(ready)
                    del busy[ready]
                elif kind == "notification":
                    last[number] = content
                    on_notify(content)
                else:
                    receive(kind, content)
        return results

    def _death(self, link: Connection, what: str) -> TrainingError:
        process = self._links[link]
        process.join(5)
        code, how = process.exitcode, f"ended with exit code {process.exitcode}"
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name} (the system does that when memory runs out)"
        return TrainingError(f"a worker process {how} while working on {what}")


def receive(kind: str, content: Any) -> None:
    """Handle, in the parent, a warning, log record or error that a worker sent."""
    if kind == "warning":
        warnings.warn(content, stacklevel=3)
    elif kind == "log":
        LOG.handle(logging.makeLogRecord(content))
    else:
        raise content


def perform(work: Callable[[Any, Notify], Any], task: Any, send: Send) -> tuple[str, Any]:
    """Run a task in a worker: the kind of the outcome, "result" or "error", and its content.

    Notifications, warnings and log records are sent meanwhile. ``send`` may return whether the
    parent stops, which ``work`` gets from its ``notify``.
    """
    LOG.handlers, LOG.propagate = [_Forward(send)], False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = "result", work(task, lambda content: send(("notification", content)))
        except NufedError as error:
            outcome = "error", _sendable(error)
        except Exception as error:
            outcome = "error", TrainingError(f"{type(error).__name__}: {error}")
    for warning in caught:
        send(("warning", _sendable(warning.message)))
    return outcome


def _end(owner: int, links: dict[Connection, BaseProcess]) -> None:
    if os.getpid() != owner:  # in a child that inherited the object
        return
    gc.unfreeze()
    for link in links:
        link.close()
    for process in links.values():
        process.terminate()
    for process in links.values():
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(
    link: Connection,
    others: list[Connection],
    device: _UsesDevice | None,
    work: Callable[[Any, Notify], Any],
    *,
    threads: int,
) -> None:
    """The main loop of a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent()
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if sys.platform == "linux":
        # a worker that wakes up does not preempt the parent, which has others to wake
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for other in others:  # so that a waiting child gets EOF when the parent dies
        other.close()
    try:
        while True:
            link.send(perform(work, link.recv(), link.send))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


class _Forward(logging.Handler):
    """Forwards log records to the parent, which has the user's handlers."""

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        # as text: the arguments of the message may not be serialisable
        about = {"name": record.name, "levelno": record.levelno, "levelname": record.levelname}
        self._send(("log", {**about, "msg": record.getMessage()}))


def _end_with_parent() -> None:
    """End this process when its parent dies, even during long work."""
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
        return
    parent = multiprocessing.parent_process()
    assert parent is not None
    Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: BaseProcess) -> None:
    wait([parent.sentinel])
    os._exit(1)


def _sendable(thing: Any) -> Any:
    """An exception or warning with its text, of the nearest class that can be serialised."""
    known = (
        kind
        for kind in type(thing).__mro__
        if kind.__module__ in ("builtins", "nufed.errors") and kind is not UpdateError
    )
    return next(known)(str(thing))
