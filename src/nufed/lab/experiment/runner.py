"""Runs a configuration from start to report, and resumes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

from nufed.algorithms.protocol import Algorithm
from nufed.errors import InputError, TrainingError
from nufed.lab.bundle.from_run import NoBundleError, bundle_of, can_be_bundled
from nufed.lab.config import Config
from nufed.lab.config.devices import torch_threads
from nufed.lab.experiment.array import Share, check_share, end_sharing, shared_run
from nufed.lab.experiment.jobs import run_jobs
from nufed.lab.experiment.observers import Listener, Observer
from nufed.lab.experiment.session import Options, Session, takes_options
from nufed.lab.experiment.setup import Setup, begin_run, load_one_run, reopen_run
from nufed.lab.experiment.training import job_of, jobs_of
from nufed.lab.files import locked
from nufed.lab.report.notebook import ShownRun, load
from nufed.lab.runs import Run, RunDirectory, load_run
from nufed.lab.runs.json_files import write_json
from nufed.lab.runs.provenance import Provenance
from nufed.objective import Objective


@takes_options
def run(
    config: str | Path | Mapping[str, Any] = "quickstart",
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    part: Share | None = None,
    figures: bool | None = True,
    on_start: Callable[[Config, Path], None] | None = None,
    on_progress: Listener | None = None,
    observers: Sequence[Observer] = (),
    **options: Unpack[Options],
) -> ShownRun:
    """Train and evaluate every method of a configuration, as ``nufed run`` does.

    Args:
        config: a preset's name, a TOML file, or the same tables as a mapping.
        overrides: ``key=value`` strings, as on the command line.
        model: your own module, or a function that makes one, instead of ``[model]``.
        data: your own data instead of ``[data] source``: ``(inputs, targets)`` or, for a natural
            federation, ``(inputs, targets, owners)``; a ``Dataset``, or :class:`nufed.Samples`.
        loss: your own ``loss(outputs, targets)``; metric: your own ``metric(outputs, targets)``, of
            which more is better unless the configuration has ``metric_better = "lower"``.
        methods: algorithms by name, in addition to those of the configuration; one with the same
            name replaces it. Settings that an object was not made with are those of ``[method]``.
        partition: your own function ``(samples, agents, samples_per_agent, rng, **partition_args)``
            instead of ``[data] partition`` (docs/algorithms.md).
        out: the run directory to create; by default the next free ``runs/NAME-001``.
        part: ``(k, n)`` trains only every n-th method and seed, beginning with the k-th, in the
            directory ``out`` that n processes share; :func:`resume` then trains what is missing and
            writes the report (docs/scale.md). The returned run has the parts that are done.
        ray: ``"auto"`` or the address of a cluster of Ray, which trains instead of this machine
            (docs/scale.md).
        figures: whether to also write the report's charts as SVG and PNG files; None: no charts,
            which is quicker.
        on_start, on_progress, on_stop: called with the directory, after every round (by default a
            notebook shows a progress bar), and on Ctrl-C or SIGTERM: current rounds are then
            finished and saved before KeyboardInterrupt is raised, and :func:`resume` resumes from
            there.
        observers: notified of starts, rounds, evaluations and the end (docs/tracking.md); an
            exception that they raise becomes a warning.

    Returns:
        The finished run, read back from its directory (``run.path``, ``run.rows()``).
    """
    session = Session.of(
        options, figures=figures, on_start=on_start, on_progress=on_progress, observers=observers
    )
    checked = load_one_run(config, overrides, session.given.methods)
    if part is not None and out is None:
        raise InputError("a part of a run needs the directory that all parts share: give --out DIR")
    with torch_threads(checked.threads):
        setup = session.setup(checked).on_ray(session.ray)
        if part is not None and out is not None:
            return _run_share(setup, Path(out), check_share(part), session)
        directory = RunDirectory.create(checked.name, None if out is None else Path(out))
        with locked(directory.path):
            begin_run(setup, directory)
            with session.observed(setup.config, directory.path) as listeners:
                with session.training(setup) as stop:
                    jobs = jobs_of(setup, directory)
                    run_jobs(jobs, setup.workers, lambda _, event: listeners.notify(event), stop)
                listeners.finished = run = finish(
                    directory, setup.objectives, setup.problem.algorithms, figures=figures
                )
            return run


@takes_options
def resume(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    trust: bool = False,
    figures: bool | None = True,
    on_start: Callable[[Config, Path], None] | None = None,
    on_progress: Listener | None = None,
    observers: Sequence[Observer] = (),
    **options: Unpack[Options],
) -> ShownRun:
    """Resume a stopped or killed run, to the same bits as an uninterrupted one.

    Args:
        path: the run directory.
        overrides: only ``rounds=…``, larger than before, to train longer.
        trust: allow importing the functions that the directory's configuration names, if any:
            whoever wrote the directory can have changed it.
        figures, on_start, on_progress, observers, options: as for :func:`run`, with the same
            objects (``model``, ``data``, ``loss``, ``metric``, ``methods``, ``partition``).
    """
    session = Session.of(
        options,
        trust=trust,
        figures=figures,
        on_start=on_start,
        on_progress=on_progress,
        observers=observers,
    )
    directory = RunDirectory(Path(path))
    with locked(directory.existing()):
        end_sharing(directory)
        setup = reopen_run(directory, overrides, session.given, trust=trust)
        setup = setup.on_ray(session.ray)
        with torch_threads(setup.config.threads):
            Provenance(directory).write_resumed(setup.config)
            with session.observed(setup.config, directory.path) as listeners:
                with session.training(setup) as stop:
                    jobs = jobs_of(setup, directory)
                    run_jobs(jobs, setup.workers, lambda _, event: listeners.notify(event), stop)
                listeners.finished = run = finish(
                    directory, setup.objectives, setup.problem.algorithms, figures=figures
                )
            return run


def _run_share(setup: Setup, out: Path, share: Share, session: Session) -> ShownRun:
    """Train some of the parts of a run whose directory several processes share."""
    with shared_run(setup, out, share) as shared:
        jobs = [job_of(shared.setup, shared.directory, part) for part in shared.parts]
        with session.observed(shared.setup.config, out) as listeners:
            with session.training(shared.setup) as stop:
                run_jobs(jobs, shared.setup.workers, lambda _, event: listeners.notify(event), stop)
            return ShownRun.of(load_run(out, partial=True))


def finish(
    directory: RunDirectory,
    objectives: Mapping[int, Objective],
    algorithms: Mapping[str, Algorithm],
    *,
    figures: bool | None = True,
) -> ShownRun:
    """Read a run back, and write its bundles, results and report.

    Args:
        directory: the run's directory.
        objectives: the objective of every seed.
        algorithms: its methods.
        figures: whether to also write the report's charts as SVG and PNG files; None: no charts.
    """
    run = load(directory.path)
    if not run.methods:
        raise TrainingError(f"no method could be trained: {run.failures[0]}")
    _write_bundles(run, objectives, algorithms, directory.bundles())
    write_json(directory.path / "results.json", run.to_json())
    from nufed.lab.report.run_page import build_report  # charts are slow to import

    build_report([run], directory.path, figures=figures)
    return run


def _write_bundles(
    run: Run,
    objectives: Mapping[int, Objective],
    algorithms: Mapping[str, Algorithm],
    folder: Path,
) -> None:
    """Write a bundle of every method's global model, first seed, if it has one."""
    if not can_be_bundled(run):
        return
    for method, seeds in run.methods.items():
        seed = next(iter(seeds))
        with suppress(NoBundleError):  # `nufed run` reports the missing file
            bundle = bundle_of(run, method, seed, objectives[seed], algorithms[method])
            bundle.save(folder / f"{method}.nufed")
