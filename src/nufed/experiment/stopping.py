"""Stopping on request: a run saves where it stands instead of dying in the middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nufed.simulation.shared import shared_zeros


class Stop:
    """Whether Ctrl-C or SIGTERM asked the run to stop; seen by all processes forked after it.

    The first request lets every part finish its round and save it; a second one ends at once.
    """

    def __init__(self, say: Callable[[], None] = lambda: None) -> None:
        self._asked = shared_zeros((1,), torch.uint8)
        self._say = say
        self._nothing_to_save = False

    def __call__(self) -> bool:
        return bool(self._asked[0])

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take requests from signals while this lasts (in the main thread, which gets them)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._ask) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Work that can't be saved half done: a request ends it without waiting."""
        self._nothing_to_save = True
        try:
            if self():
                raise KeyboardInterrupt
            yield
        finally:
            self._nothing_to_save = False

    def _ask(self, *_: Any) -> None:
        if self() or self._nothing_to_save:
            self._asked[0] = 1
            raise KeyboardInterrupt
        self._asked[0] = 1
        self._say()
