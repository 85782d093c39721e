"""Observers of a run: events while it trains, and who is notified of them.

An observer is an object with some of the methods of :class:`Observer`, passed as
``nufed.run(..., observers=[...])``. It runs in the parent process, also if methods train in worker
processes, gets numbers and never models, and can't change a run's bits. If it raises, a warning
names it and the exception, once, and the run continues.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

import torch

from nufed.errors import ObserverWarning, in_short, visible
from nufed.lab.config import Config
from nufed.lab.config.devices import torch_threads
from nufed.lab.runs import Run
from nufed.lab.runs.records import MetricsLine


@dataclass(frozen=True)
class Event:
    """Progress of one method and seed after ``round`` rounds.

    Args:
        seed, method: which training; the null baselines are one of their own, without scores.
        round: rounds done so far; 0: the initial model.
        score: mean score of the personal model on agents seen in training, after the number of
            fine-tuning steps that results show, at the latest evaluation.
        global_score: the same of the global model, if there is one.
        unseen_score, unseen_global_score: both on agents held out from training, if there are any.
        scored_round: the round that these scores and ``training_loss`` belong to.
        training_loss: mean loss on the training samples of that round's cohort.
        update_norm: Euclidean norm of the server's change of the model in this round.
        gradients, hvps: gradients and Hessian-vector products of training so far.
        evaluation_gradients, evaluation_hvps: the same of all evaluations so far.
        last: this was its last round, of the configuration's or by early stopping.
        starts: the training starts, or resumes after ``round``.
    """

    seed: int
    method: str
    round: int
    score: float | None = None
    global_score: float | None = None
    unseen_score: float | None = None
    unseen_global_score: float | None = None
    scored_round: int | None = None
    training_loss: float | None = None
    update_norm: float | None = None
    gradients: int = 0
    hvps: int = 0
    evaluation_gradients: int = 0
    evaluation_hvps: int = 0
    last: bool = False
    starts: bool = False

    @property
    def evaluated(self) -> bool:
        """Whether the model of this very round was evaluated."""
        return not self.starts and self.scored_round == self.round

    def after(self, line: MetricsLine, steps: int) -> Event:
        """The event after the round of a line of metrics; scores are after ``steps`` steps."""
        scored: dict[str, Any] = {}
        if "seen" in line.evaluation:
            seen, unseen = line.evaluation["seen"], line.evaluation.get("unseen")
            scored = {
                "score": seen.score[steps],
                "global_score": seen.global_score,
                "unseen_score": unseen and unseen.score[steps],
                "unseen_global_score": unseen and unseen.global_score,
                "scored_round": line.round,
                "training_loss": line.training_loss,
            }
        return replace(
            self,
            round=line.round,
            update_norm=line.update_norm,
            gradients=self.gradients + line.gradients,
            hvps=self.hvps + line.hvps,
            evaluation_gradients=self.evaluation_gradients + line.evaluation_gradients,
            evaluation_hvps=self.evaluation_hvps + line.evaluation_hvps,
            starts=False,
            **scored,
        )


Listener: TypeAlias = Callable[[Event], None]


class Observer:
    """Base class of observers, whose methods do nothing unless they are overridden.

    >>> class Losses(Observer):
    ...     def evaluation(self, event):
    ...         print(event.method, event.round, event.training_loss)
    """

    def start(self, config: Config, path: Path) -> None:
        """A run starts, or resumes, in the directory ``path``."""

    def part(self, event: Event) -> None:
        """A method and seed, or the null baselines, start or resume after ``event.round``.

        On resume, rounds after it of which observers were notified before are trained, and
        notified, again.
        """

    def round(self, event: Event) -> None:
        """A round was trained."""

    def evaluation(self, event: Event) -> None:
        """The model after ``event.round`` rounds was evaluated (also the initial one, round 0)."""

    def end(self, run: Run | None) -> None:
        """The run is finished; None: it was stopped, or failed."""


class Observers:
    """Notifies observers, and the callbacks ``on_start`` and ``on_progress``, of a run.

    An exception of a callback ends the run, one of an observer does not. In a notebook a bar is
    shown, unless ``on_progress`` shows progress. ``finished`` is the run that observers are given
    at the end: None if it was stopped, or failed.
    """

    finished: Run | None = None

    def __init__(
        self,
        observers: Sequence[Observer],
        on_start: Callable[[Config, Path], None] | None,
        on_progress: Listener | None,
    ) -> None:
        display = None if on_progress else notebook_display()
        self._observers = [*observers, *([] if display is None else [NotebookBar(display)])]
        self._on_start, self._on_progress = on_start, on_progress
        self._failed: list[Observer] = []

    def start(self, config: Config, path: Path) -> None:
        if self._on_start:
            self._on_start(config, path)
        self._notify(lambda observer: observer.start(config.model_copy(deep=True), path))

    def notify(self, event: Event) -> None:
        """Called with every event, in the parent process."""
        if self._on_progress:
            self._on_progress(event)
        if event.starts:
            self._notify(lambda observer: observer.part(event))
            return
        if event.round:
            self._notify(lambda observer: observer.round(event))
        if event.evaluated:
            self._notify(lambda observer: observer.evaluation(event))

    def end(self) -> None:
        self._notify(lambda observer: observer.end(self.finished))

    def _notify(self, call: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                with _same_torch():
                    call(observer)
            except Exception as error:
                if not any(observer is known for known in self._failed):
                    self._failed.append(observer)
                    warnings.warn(
                        f"the observer {type(observer).__name__} failed and may have missed "
                        f"something; the run continues: {in_short(error)}",
                        ObserverWarning,
                        stacklevel=2,
                    )


@contextmanager
def _same_torch() -> Iterator[None]:
    """Restores torch's settings that bits depend on. Random streams are nufed's own."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        with torch_threads(torch.get_num_threads()):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


REDRAW_SECONDS = 0.1  # at most so often, as every update is a message to the browser


class NotebookBar(Observer):
    """A bar with the current method, round and score, redrawn in place.

    Args:
        display: IPython's ``display``.
    """

    def __init__(self, display: Any) -> None:
        self._display = display

    def start(self, config: Config, path: Path) -> None:
        self._rounds = {method: config.rounds_of(method) for method in config.algorithms()}
        self._total = sum(self._rounds.values()) * len(config.seeds)
        self._done: dict[tuple[str, int], int] = {}  # rounds by method and seed
        self._text, self._drawn = f"run directory: {path}", time.monotonic()
        self._handle = self._display(self, display_id=True)

    def part(self, event: Event) -> None:
        self.round(event)

    def round(self, event: Event) -> None:
        self._text = f"seed {event.seed}, {event.method}"
        if event.method in self._rounds:
            rounds = self._rounds[event.method]
            self._done[event.method, event.seed] = rounds if event.last else event.round
            self._text += f", round {event.round} of {rounds}"
        if event.score is not None:
            self._text += f", {event.score:.3f} in round {event.scored_round}"
        if time.monotonic() > self._drawn + REDRAW_SECONDS:
            self._draw()

    def end(self, run: Run | None) -> None:
        if run is not None:  # of parts finished before a resume there are no events
            self._done = {("", 0): self._total}
        self._text = "stopped" if run is None else f"run directory: {run.path}"
        self._draw()

    def _draw(self) -> None:
        self._handle.update(self)
        self._drawn = time.monotonic()

    def _repr_html_(self) -> str:
        done = sum(self._done.values())
        bar = f'<progress value="{done}" max="{self._total}"></progress>'
        return f"{bar} {done / self._total:.0%} {escape(visible(self._text))}"

    def __repr__(self) -> str:
        return f"{sum(self._done.values())} of {self._total} rounds, {visible(self._text)}"


def notebook_display() -> Any:
    """IPython's ``display`` inside a notebook; None elsewhere, a terminal's IPython too."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display
