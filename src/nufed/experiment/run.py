"""A run from its configuration to its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from nufed.evaluate import Metric
from nufed.experiment.finish import finish
from nufed.experiment.parts import BASELINES, Event, Listener, Part, parts_of, run_part
from nufed.experiment.setup import Setup
from nufed.experiment.stopping import Stop
from nufed.objective import Loss
from nufed.runs import Config, Run, RunDirectory, load_config
from nufed.runs.begun import Begun
from nufed.runs.durable import locked
from nufed.runs.trust import require_trust
from nufed.simulation import Workers
from nufed.threads import torch_threads

# the keys of a configuration in whose place objects can be passed
_KEYS = {"model": "model.name", "data": "data.source", "loss": "loss", "metric": "metric"}


def run(
    config: str | Path | Mapping[str, Any] = "quickstart",
    overrides: Sequence[str] = (),
    *,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    out: str | Path | None = None,
    figures: bool = True,
    on_start: Callable[[Config, Path], None] | None = None,
    on_progress: Listener | None = None,
    on_stop: Callable[[], None] | None = None,
) -> Run:
    """Train and evaluate every method of a configuration, as ``nufed run`` does.

    Args:
        config: a preset's name, a TOML file, or the same tables as a mapping.
        overrides: ``key=value`` strings, as on the command line.
        model: your own module, or a function that makes one, instead of ``[model]``.
        data: your own data instead of ``[data] source``: ``(inputs, targets)``, with ``owners`` as
            a third for a natural federation, a ``Dataset``, or :class:`nufed.Samples`.
        loss: your own ``loss(outputs, targets)``; metric: your own ``metric(outputs, targets)``,
            more is better.
        out: the run directory to make; ``runs/NAME-001`` and so on by default.
        figures: whether to draw the report's charts as SVG and PNG files too.
        on_start, on_progress, on_stop: called with the directory, after every round, and when
            Ctrl-C or SIGTERM asks to stop: rounds are then finished and saved before
            KeyboardInterrupt is raised, and :func:`resume` goes on from there.

    Returns:
        The finished run, read back from its directory (``run.path``, ``run.rows()``).
    """
    checked = load_config(config, overrides)
    own = {"model": model, "data": data, "loss": loss, "metric": metric}
    with torch_threads(checked.threads):
        setup = Setup.make(checked, **own)
        directory = RunDirectory.create(checked.name, None if out is None else Path(out))
        with locked(directory.path):
            for seed, federation in setup.federations.items():
                directory.write_split(federation.split, setup.samples, seed)
            Begun(directory).write(
                setup.config,
                setup.measure,
                setup.engine_names,
                setup.samples,
                setup.samples.fingerprint,
            )
            return _train(setup, directory, figures, on_start, on_progress, on_stop)


def resume(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    trust: bool = False,
    figures: bool = True,
    on_start: Callable[[Config, Path], None] | None = None,
    on_progress: Listener | None = None,
    on_stop: Callable[[], None] | None = None,
) -> Run:
    """Resume a run that was stopped or killed, to the same bits as one that was not.

    Args:
        path: the run directory.
        overrides: only ``rounds=…``, larger than before, to train longer.
        model, data, loss, metric: what was passed as objects to :func:`run`, again.
        trust: allow importing the functions that the directory's configuration names, if it names
            any: it need not be the one that you wrote.
        figures: as for :func:`run`.
    """
    directory = RunDirectory(Path(path))
    with locked(directory.existing()):
        begun = Begun(directory)
        config = begun.read_to_resume(overrides)
        own = {"model": model, "data": data, "loss": loss, "metric": metric}
        require_trust(
            directory.path, config, trust, [_KEYS[k] for k, v in own.items() if v is not None]
        )
        with torch_threads(config.threads):
            setup = Setup.make(config, begun.engines(), **own)
            begun.check_same(
                setup.config,
                setup.samples.fingerprint,
                {seed: f.split for seed, f in setup.federations.items()},
            )
            begun.write_resumed(setup.config)
            return _train(setup, directory, figures, on_start, on_progress, on_stop)


def _train(
    setup: Setup,
    directory: RunDirectory,
    figures: bool,
    on_start: Callable[[Config, Path], None] | None,
    on_progress: Listener | None,
    on_stop: Callable[[], None] | None,
) -> Run:
    """Do all that is not done yet, then read it back and report."""
    if on_start:
        on_start(setup.config, directory.path)
    stop = Stop(on_stop or (lambda: None))
    with stop.listening():
        _run_parts(setup, directory, on_progress or (lambda event: None), stop)
    if stop():
        raise KeyboardInterrupt
    return finish(directory, setup.objectives, figures=figures)


def _run_parts(setup: Setup, directory: RunDirectory, listener: Listener, stop: Stop) -> None:
    """Train and evaluate every method and seed, several at a time where there are workers."""
    parts = parts_of(setup)
    together = min(setup.workers, len(parts))
    if together == 1:
        for part in parts:
            if not stop():
                run_part(setup, part, directory, listener, setup.workers, stop)
        return

    def answer(part: Part, note: Callable[[Event], None]) -> None:
        if not stop():
            run_part(setup, part, directory, note, setup.workers // together, stop)

    def describe(part: Part, last: Event | None) -> str:
        return f"{part}, after round {last.round}" if last else str(part)

    def enough(busy: list[Part]) -> bool:
        return stop() and all(part.method == BASELINES for part in busy)

    workers = Workers(together, answer)
    try:
        longest_first = sorted(parts, key=lambda part: -part.work)
        workers.ask(longest_first, describe, listener, enough)
    finally:
        workers.close()
