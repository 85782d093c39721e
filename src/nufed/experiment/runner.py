"""Runs a configuration from start to report, and resumes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from nufed.algorithms.protocol import Algorithm
from nufed.config import Config, load_config
from nufed.config.problem import Given, Problem
from nufed.data import Partition
from nufed.errors import InputError
from nufed.evaluate import Metric
from nufed.experiment.jobs import Job, run_jobs
from nufed.experiment.notebook_bar import with_notebook_bar
from nufed.experiment.observers import Listener, Observer, Observers
from nufed.experiment.run_directories import begin_run, check_simulated, reopen_run
from nufed.experiment.run_parts import parts_of
from nufed.experiment.setup import Setup
from nufed.experiment.stopping import Stop
from nufed.files import locked
from nufed.objective import Loss
from nufed.objective.threads import torch_threads
from nufed.report.finish import finish
from nufed.report.shown_run import ShownRun
from nufed.runs import RunDirectory
from nufed.runs.provenance import Provenance


def run(
    config: str | Path | Mapping[str, Any] = "quickstart",
    overrides: Sequence[str] = (),
    *,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    methods: Mapping[str, Algorithm] | None = None,
    partition: Partition | None = None,
    out: str | Path | None = None,
    figures: bool = True,
    on_start: Callable[[Config, Path], None] | None = None,
    on_progress: Listener | None = None,
    on_stop: Callable[[], None] | None = None,
    observers: Sequence[Observer] = (),
) -> ShownRun:
    """Train and evaluate every method of a configuration, as ``nufed run`` does.

    Args:
        config: a preset's name, a TOML file, or the same tables as a mapping.
        overrides: ``key=value`` strings, as on the command line.
        model: your own module, or a function that makes one, instead of ``[model]``.
        data: your own data instead of ``[data] source``: ``(inputs, targets)`` or, for a natural
            federation, ``(inputs, targets, owners)``; a ``Dataset``, or :class:`nufed.Samples`.
        loss: your own ``loss(outputs, targets)``; metric: your own ``metric(outputs, targets)``,
            higher is better.
        methods: algorithms by name, in addition to those of the configuration; one with the same
            name replaces it.
        partition: your own function ``(samples, agents, samples_per_agent, rng, **partition_args)``
            instead of ``[data] partition`` (docs/algorithms.md).
        out: the run directory to create; by default the next free ``runs/NAME-001``.
        figures: whether to also write the report's charts as SVG and PNG files.
        on_start, on_progress, on_stop: called with the directory, after every round (by default a
            notebook shows a progress bar), and on Ctrl-C or SIGTERM: current rounds are then
            finished and saved before KeyboardInterrupt is raised, and :func:`resume` resumes from
            there.
        observers: told about starts, rounds, evaluations and the end (docs/tracking.md); what they
            raise is a warning.

    Returns:
        The finished run, read back from its directory (``run.path``, ``run.rows()``).
    """
    checked = load_config(config, overrides)
    check_simulated(checked)
    if checked.sweep:
        raise InputError(
            "[sweep] is for several runs: start them with `nufed sweep`, or remove the table"
        )
    with torch_threads(checked.threads):
        given = Given(model, data, loss, metric, methods, partition)
        setup = Setup.make(Problem.make(checked, given))
        directory = RunDirectory.create(checked.name, None if out is None else Path(out))
        with locked(directory.path):
            begin_run(setup, directory)
            told = Observers(with_notebook_bar(observers, on_progress), on_start, on_progress)
            return _train(setup, directory, figures, told, on_stop)


def resume(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    data: Any = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    methods: Mapping[str, Algorithm] | None = None,
    partition: Partition | None = None,
    trust: bool = False,
    figures: bool = True,
    on_start: Callable[[Config, Path], None] | None = None,
    on_progress: Listener | None = None,
    on_stop: Callable[[], None] | None = None,
    observers: Sequence[Observer] = (),
) -> ShownRun:
    """Resume a stopped or killed run, to the same bits as an uninterrupted one.

    Args:
        path: the run directory.
        overrides: only ``rounds=…``, larger than before, to train longer.
        model, data, loss, metric, methods, partition: the same objects that were passed to
            :func:`run`.
        trust: allow importing the functions that the directory's configuration names, if any:
            whoever wrote the directory can have changed it.
        figures, on_start, on_progress, on_stop, observers: as for :func:`run`.
    """
    directory = RunDirectory(Path(path))
    with locked(directory.existing()):
        given = Given(model, data, loss, metric, methods, partition)
        setup = reopen_run(directory, overrides, given, trust=trust)
        with torch_threads(setup.config.threads):
            Provenance(directory).write_resumed(setup.config)
            told = Observers(with_notebook_bar(observers, on_progress), on_start, on_progress)
            return _train(setup, directory, figures, told, on_stop)


def _train(
    setup: Setup,
    directory: RunDirectory,
    figures: bool,
    observers: Observers,
    on_stop: Callable[[], None] | None,
) -> ShownRun:
    """Run all unfinished parts, then read the run back and write its report."""
    observers.start(setup.config, directory.path)
    stop, finished = Stop(on_stop or (lambda: None)), None
    jobs = [Job(setup, directory, part) for part in parts_of(setup)]
    try:
        with stop.on_signals():
            run_jobs(jobs, setup.workers, lambda job, event: observers.tell(event), stop)
        if stop():
            raise KeyboardInterrupt
        finished = finish(directory, setup.objectives, setup.problem.algorithms, figures=figures)
        return finished
    finally:
        observers.end(finished)
