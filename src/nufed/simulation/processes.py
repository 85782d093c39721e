"""Processes forked from this one that answer questions, one at a time each.

Fork, because a child then has everything the parent has: the data without a copy, and modules,
losses and metrics that could not be sent. A child must not use more than one thread of torch, whose
pools do not survive a fork. Questions and answers are small; vectors go through shared memory.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from nufed.errors import NufedError, RunError, TrainingError, UpdateError

Note: TypeAlias = Callable[[Any], None]
LOG = logging.getLogger("nufed")


def can_fork() -> bool:
    """Whether this system forks safely; macOS and Windows do not."""
    return sys.platform == "linux"


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class Workers:
    """``count`` processes that call ``answer(question, note)``.

    What a child gives to ``note`` reaches the parent while the question is still being answered,
    and so does what it logs with the logger "nufed".
    Children end when asked to, and by themselves when the parent is gone.
    """

    def __init__(self, count: int, answer: Callable[[Any, Note], Any]) -> None:
        self._links: dict[Connection, BaseProcess] = {}
        self.close = weakref.finalize(self, _end, os.getpid(), self._links)
        try:
            for _ in range(count):
                self._start(answer)
        except OSError as error:  # too many open files, or processes
            self.close()  # or Python would wait for them when it ends
            raise RunError(
                f"{count} worker processes can't be started ({error.strerror}): allow more open "
                "files (`ulimit -n`) and processes (`ulimit -u`), or set workers=1"
            ) from error

    def _start(self, answer: Callable[[Any, Note], Any]) -> None:
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, [*self._links, mine], answer), name="nufed worker"
        )
        with warnings.catch_warnings():
            # Python warns of threads at a fork: a child uses none that were running
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self._links[mine] = process

    def ask(
        self,
        questions: Sequence[Any],
        describe: Callable[[Any, Any], str],
        on_note: Note = lambda note: None,
        enough: Callable[[list[Any]], bool] | None = None,
    ) -> list[Any]:
        """The answers, in the order of the questions; each goes to the first process that is free.

        An exception of a child is raised here. If a process dies, the error names what it was at:
        ``describe(question, last note)``. ``enough(questions being answered)`` is asked now and
        then whether the others can be left without an answer.
        """
        waiting = deque(enumerate(questions))
        idle, busy = list(self._links), dict[Connection, int]()
        answers: list[Any] = [None] * len(waiting)
        last_notes: dict[int, Any] = {}
        while waiting or busy:
            if enough and enough([questions[place] for place in busy.values()]):
                break
            while waiting and idle:
                link = idle.pop()
                busy[link], question = waiting.popleft()
                try:
                    link.send(question)
                except (BrokenPipeError, ConnectionResetError):
                    raise self._death(link, describe(question, None)) from None
            for ready in wait(list(busy), timeout=0.5 if enough else None):
                assert isinstance(ready, Connection)
                place = busy[ready]
                try:
                    kind, content = ready.recv()
                except (EOFError, OSError):  # also in the middle of a message
                    what = describe(questions[place], last_notes.get(place))
                    raise self._death(ready, what) from None
                if kind == "note":
                    last_notes[place] = content
                    on_note(content)
                elif kind == "warning":
                    warnings.warn(content, stacklevel=2)
                elif kind == "log":
                    LOG.handle(logging.makeLogRecord(content))
                elif kind == "error":
                    raise content
                else:
                    answers[place] = content
                    idle.append(ready)
                    del busy[ready]
        return answers

    def _death(self, link: Connection, what: str) -> TrainingError:
        process = self._links[link]
        process.join(5)
        code, how = process.exitcode, f"ended with exit code {process.exitcode}"
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            how = f"was ended by {name} (the system does that when memory runs out)"
        return TrainingError(f"a worker process {how} while it was at {what}")


def _end(owner: int, links: dict[Connection, BaseProcess]) -> None:
    if os.getpid() != owner:  # in a child that has inherited the object
        return
    for link in links:
        link.close()
    for process in links.values():
        process.terminate()
    for process in links.values():
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(link: Connection, others: list[Connection], answer: Callable[[Any, Note], Any]) -> None:
    """The life of a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent()
    # a worker that wakes up does not push the parent aside, which has others to wake
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for other in others:  # so that a child that waits sees the end of the parent
        other.close()
    LOG.handlers, LOG.propagate = [_Forward(link)], False
    try:
        while True:
            question = link.recv()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    kind, content = "answer", answer(question, lambda n: link.send(("note", n)))
                except NufedError as error:
                    kind, content = "error", _sendable(error)
                except Exception as error:
                    kind, content = "error", TrainingError(f"{type(error).__name__}: {error}")
            for warning in caught:
                link.send(("warning", _sendable(warning.message)))
            link.send((kind, content))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


class _Forward(logging.Handler):
    """Gives log records to the parent, which has the handlers that the user set."""

    def __init__(self, link: Connection) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        # as text: what the message is made of need not be sendable
        about = {"name": record.name, "levelno": record.levelno, "levelname": record.levelname}
        self._link.send(("log", {**about, "msg": record.getMessage()}))


def _end_with_parent() -> None:
    """Let the system end this process with its parent, also in the middle of long work."""
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


def _sendable(thing: Any) -> Any:
    """An exception or warning with its text, of the nearest class that the parent can make."""
    known = (
        kind
        for kind in type(thing).__mro__
        if kind.__module__ in ("builtins", "nufed.errors") and kind is not UpdateError
    )
    return next(known)(str(thing))
