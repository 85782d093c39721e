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
from nufed.experiment.run_parts import Listener, parts_of
from nufed.experiment.setup import Setup
from nufed.experiment.stopping import Stop
from nufed.files import locked
from nufed.objective import Loss
from nufed.objective.threads import torch_threads
from nufed.report.finish import finish
from nufed.runs import Run, RunDirectory
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
) -> Run:
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
        on_start, on_progress, on_stop: called with the directory, after every round, and on Ctrl-C
            or SIGTERM: current rounds are then finished and saved before KeyboardInterrupt is
            raised, and :func:`resume` resumes from there.

    Returns:
        The finished run, read back from its directory (``run.path``, ``run.rows()``).
    """
    checked = load_config(config, overrides)
    check_simulated(checked)
    with torch_threads(checked.threads):
        given = Given(model, data, loss, metric, methods, partition)
        setup = Setup.make(Problem.make(checked, given))
        directory = RunDirectory.create(checked.name, None if out is None else Path(out))
        with locked(directory.path):
            for seed, federation in setup.problem.federations.items():
                directory.write_split(federation.split, federation.samples, seed)
            Provenance(directory).write(
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
    methods: Mapping[str, Algorithm] | None = None,
    partition: Partition | None = None,
    trust: bool = False,
    figures: bool = True,
    on_start: Callable[[Config, Path], None] | None = None,
    on_progress: Listener | None = None,
    on_stop: Callable[[], None] | None = None,
) -> Run:
    """Resume a stopped or killed run, to the same bits as an uninterrupted one.

    Args:
        path: the run directory.
        overrides: only ``rounds=…``, larger than before, to train longer.
        model, data, loss, metric, methods, partition: the same objects that were passed to
            :func:`run`.
        trust: allow importing the functions that the directory's configuration names, if any:
            whoever wrote the directory can have changed it.
        figures, on_start, on_progress, on_stop: as for :func:`run`.
    """
    directory = RunDirectory(Path(path))
    with locked(directory.existing()):
        provenance = Provenance(directory)
        config = provenance.read_to_resume(overrides)
        given = Given(model, data, loss, metric, methods, partition)
        recorded = provenance.recorded(config)
        recorded.check_trusted(given, trust)
        engines = provenance.engines()
        provenance.check_config(given.with_placeholders(config))
        with torch_threads(config.threads):
            problem = Problem.rebuild(recorded, given, trust=trust)
            provenance.check_split_files({seed: f.split for seed, f in problem.federations.items()})
            setup = Setup.make(problem, engines)
            provenance.write_resumed(setup.config)
            return _train(setup, directory, figures, on_start, on_progress, on_stop)


def check_simulated(config: Config) -> None:
    """Refuse the tables of a real federation."""
    for table in ("federation", "privacy"):
        if table in config.model_dump():
            raise InputError(
                f"[{table}] is for a federation whose sites keep their data: start it with `nufed "
                "federate run`, or remove the table to simulate"
            )


def _train(
    setup: Setup,
    directory: RunDirectory,
    figures: bool,
    on_start: Callable[[Config, Path], None] | None,
    on_progress: Listener | None,
    on_stop: Callable[[], None] | None,
) -> Run:
    """Run all unfinished parts, then read the run back and write its report."""
    if on_start:
        on_start(setup.config, directory.path)
    stop = Stop(on_stop or (lambda: None))
    listener = on_progress or (lambda event: None)
    jobs = [Job(setup, directory, part) for part in parts_of(setup)]
    with stop.on_signals():
        run_jobs(jobs, setup.workers, lambda job, event: listener(event), stop)
    if stop():
        raise KeyboardInterrupt
    return finish(directory, setup.objectives, setup.problem.algorithms, figures=figures)
