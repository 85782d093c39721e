"""A call of run, sweep or tune: what the user gave beside the configuration, and how it is stopped.

On Ctrl-C or SIGTERM a run saves a checkpoint before it ends.
"""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from torch import nn

from nufed.algorithms.protocol import Algorithm
from nufed.data import Partition, Samples
from nufed.errors import ResumableError
from nufed.evaluate import Metric
from nufed.lab.config import Config
from nufed.lab.config.problem import Given, Problem
from nufed.lab.experiment.observers import Observer, Observers
from nufed.lab.experiment.setup import Setup
from nufed.objective import Loss
from nufed.registry import suggest
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
        """For work without checkpoints: the first signal ends it immediately."""
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


@contextmanager
def resumed_by(command: str) -> Iterator[None]:
    """Errors name the command that resumes the whole, instead of one of its runs."""
    try:
        yield
    except ResumableError as error:
        raise error.resumed_by(command) from error


class Options(TypedDict, total=False):
    """What run, resume, sweep, resume_sweep and tune all take: see :func:`nufed.run`."""

    model: Callable[[], nn.Module] | nn.Module | None
    data: Any
    loss: Loss | None
    metric: Metric | None
    methods: Mapping[str, Algorithm] | None
    partition: Partition | None
    ray: str | None
    on_stop: Callable[[], None] | None


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def takes_options(function: FunctionT) -> FunctionT:
    """The function, whose signature names its options, for ``help`` and completion."""
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    for name, hint in Options.__annotations__.items():  # as written: ``Loss | None``
        text = hint.__forward_arg__
        named.append(inspect.Parameter(name, kind, default=None, annotation=text))
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Session:
    """A call of :func:`nufed.run`, ``resume``, ``sweep``, ``resume_sweep`` or ``tune``.

    Args:
        given: the objects.
        trust: allow importing the code that a directory names.
        ray: the address of a cluster.
        figures: whether to write charts as files; None: no charts at all.
        on_start, on_progress, on_stop: callbacks; what the first two are given depends on the call.
        observers: of a run.
    """

    given: Given
    trust: bool = False
    ray: str | None = None
    figures: bool | None = True
    on_start: Callable[..., None] | None = None
    on_progress: Callable[..., None] | None = None
    on_stop: Callable[[], None] | None = None
    observers: Sequence[Observer] = ()

    @classmethod
    def of(cls, options: Options, **others: Any) -> Session:
        """A session from the options common to these functions, and further ones of this call."""
        given: dict[str, Any] = dict(options)
        for name in given:
            if name not in Options.__annotations__:
                raise TypeError(
                    f"unexpected argument {name!r}{suggest(name, Options.__annotations__)}"
                )
        objects = {field.name: given.pop(field.name, None) for field in fields(Given)}
        return cls(Given(**objects), **given, **others)

    def setup(self, config: Config, samples: Samples | None = None) -> Setup:
        """Everything that training needs, on this machine."""
        problem = Problem.make(config, self.given, samples=samples)
        return Setup.make(problem.with_step_sizes())

    @contextmanager
    def observed(self, config: Config, path: Path) -> Iterator[Observers]:
        """Notifies observers and callbacks of a run from its start to its end."""
        listeners = Observers(self.observers, self.on_start, self.on_progress)
        listeners.start(config, path)
        try:
            yield listeners
        finally:
            listeners.end()

    @contextmanager
    def training(self, setup: Setup) -> Iterator[Stop]:
        """Training with a setup, whose cluster is left at the end.

        A signal sets the stop flag; KeyboardInterrupt is raised when training has ended.
        """
        stop = Stop(self.on_stop or (lambda: None))
        with setup.closing(), stop.on_signals():
            yield stop
        if stop():
            raise KeyboardInterrupt
