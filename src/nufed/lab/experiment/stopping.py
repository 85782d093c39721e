"""Graceful stop on Ctrl-C or SIGTERM: a run saves a checkpoint before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nufed.simulation.worker_pool import shared_bytes


class Stop:
    """A stop flag set by Ctrl-C or SIGTERM, shared with all worker processes started later.

    On the first signal every part finishes and saves its round; a second one ends immediately.
    """

    def __init__(self, on_stop: Callable[[], None] = lambda: None) -> None:
        self._requested = shared_bytes(1)
        self._on_stop = on_stop
        self._immediately = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_on_stop": None}  # for spawned processes, which get no signals

    def __call__(self) -> bool:
        return bool(self._requested[0])

    def request(self) -> None:
        """Set the flag without a signal."""
        self._requested[0] = 1

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle signals inside this context; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._handle) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def immediately(self) -> Iterator[None]:
        """For work without checkpoints: the first signal already ends it immediately."""
        self._immediately = True
        try:
            if self():
                raise KeyboardInterrupt
            yield
        finally:
            self._immediately = False

    def _handle(self, *_: Any) -> None:
        if self() or self._immediately:
            self._requested[0] = 1
            raise KeyboardInterrupt
        self._requested[0] = 1
        self._on_stop()
