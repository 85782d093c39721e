"""Runs the grid of a sweep, the parts of all runs spread over workers together; resumes it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from nufed.data import Samples, as_samples
from nufed.errors import InputError, RunError, TrainingError, in_short
from nufed.lab.config.devices import torch_threads
from nufed.lab.config.load import read_config
from nufed.lab.config.problem import Given, Recorded, build_samples
from nufed.lab.config.schema import OWN, DataConfig
from nufed.lab.config.sweep_grid import MAX_RUNS, Grid, GridPoint, in_words, make_grid, of_run
from nufed.lab.config.trust import named_code, require_trust
from nufed.lab.experiment.jobs import BASELINE_PART, Job, run_jobs
from nufed.lab.experiment.observers import Event, Listener
from nufed.lab.experiment.runner import finish
from nufed.lab.experiment.session import Options, Session, Stop, resumed_by, takes_options
from nufed.lab.experiment.setup import Setup, begin_run, check_simulated, reopen_run, worker_count
from nufed.lab.experiment.training import job_of, parts_of
from nufed.lab.files import locked
from nufed.lab.report.result_files import write_results
from nufed.lab.runs import Run, RunDirectory, load_run
from nufed.lab.runs.part_files import PartFiles
from nufed.lab.runs.provenance import Provenance
from nufed.lab.runs.sweep_record import MANIFEST, Sweep, read_manifest, run_path, write_manifest

LOG = logging.getLogger("nufed")


@dataclass(frozen=True)
class SweepJob(Job):
    """A part of a run of a sweep. If it fails, the others continue."""

    def __call__(self, listener: Listener, workers: int, stop: Stop) -> None:
        engines = {self.part.seed: self.setup.engines[self.part.seed].fresh()}
        job = job_of(replace(self.setup, engines=engines), self.directory, self.part)
        try:
            job(listener, workers, stop)  # on engines of its own, whose memory is freed at its end
        except RunError:  # for example a full disk, which the others would find, too
            raise
        except Exception as error:  # the user's model, loss, metric or algorithm may raise anything
            reason = str(error) if isinstance(error, TrainingError) else in_short(error)
            if self.part.method != BASELINE_PART:
                self.directory.write_failure(self.part.method, self.part.seed, reason)
            LOG.warning("%s failed: %s", self, reason)

    def __str__(self) -> str:
        return f"{self.directory.path.name}: {self.part}"

    def files(self) -> dict[str, PartFiles]:
        return job_of(self.setup, self.directory, self.part).files()


@dataclass(frozen=True)
class LoadedSamples:
    """Data by its source, so that runs with the same data share it."""

    given: Given
    _loaded: dict[str, Samples] = field(default_factory=dict)

    def __call__(self, data: DataConfig) -> Samples | None:
        """The samples; None if they were given in Python then but not now."""
        if self.given.data is None and data.source == OWN:
            return None
        key = json.dumps([data.source, data.args], sort_keys=True, default=repr)
        if self.given.data is not None:
            key = OWN
        if key not in self._loaded:
            given = self.given.data
            self._loaded[key] = build_samples(data) if given is None else as_samples(given)
        return self._loaded[key]


@dataclass(frozen=True)
class PreparedRun:
    """A run of a sweep that can start."""

    point: GridPoint
    setup: Setup
    directory: RunDirectory
    new: bool = False

    def jobs(self) -> Iterator[SweepJob]:
        """Its unfinished parts, and its null baselines."""
        for part in parts_of(self.setup):
            job = SweepJob(self.setup, self.directory, part)
            if part.method == BASELINE_PART or not job.is_done():
                yield job


def without_engines(setup: Setup) -> Setup:
    """A setup without cached engines: a sweep holds the setups of all runs in memory."""
    return replace(setup, engines={seed: e.fresh() for seed, e in setup.engines.items()})


def check_comparable(grid: Grid, setups: Sequence[Setup]) -> None:
    """Refuse runs whose scores can't be compared, and runs that are the same."""
    measured = {(s.measure.name, s.config.eval_on): s for s in setups}
    if len(measured) > 1:
        words = " and ".join(f"{on} {name}" for name, on in measured)
        raise InputError(
            f"the runs have different scores ({words}), which can't be compared: sweep other keys"
        )
    first: dict[tuple[str, str], GridPoint] = {}
    for point, setup in zip(grid.points, setups, strict=True):
        rounds = str(setup.config.all_rounds)
        same = first.setdefault((setup.config.fingerprint, rounds), point)
        if same is not point:
            raise InputError(
                f"the runs with {in_words(same.values)} and with {in_words(point.values)} have "
                "the same settings: remove one, or the object in Python that replaces the key"
            )


def prepare_new(path: Path, point: GridPoint, setup: Setup, stack: ExitStack) -> PreparedRun:
    """A run that is new: its directory is created, locked and written."""
    directory = RunDirectory.create(point.name, run_path(path, point.name))
    stack.enter_context(locked(directory.path))
    begin_run(setup, directory)
    return PreparedRun(point, setup, directory)


def prepare_again(
    path: Path, point: GridPoint, session: Session, loaded: LoadedSamples, stack: ExitStack
) -> PreparedRun:
    """A run of a sweep to resume, or one whose directory is still to be written (``new``)."""
    directory = RunDirectory(run_path(path, point.name))
    if not (directory.path / "run.json").exists():
        recorded = Recorded(path, point.config, "", {})
        recorded.check_given(session.given, ("data.source", "data.partition", "model.name", "loss"))
        setup = without_engines(session.setup(point.config, loaded(point.config.data)))
        if not directory.path.exists():
            RunDirectory.create(point.name, directory.path)
        stack.enter_context(locked(directory.path))
        return PreparedRun(point, setup, directory, new=True)
    stack.enter_context(locked(directory.path))
    setup = without_engines(
        reopen_run(directory, (), session.given, trust=session.trust, load_samples=loaded)
    )
    then, now = point.config, setup.config
    if (then.fingerprint, then.all_rounds) != (now.fingerprint, now.all_rounds):
        raise RunError(
            f"{directory.path} has other settings than {path / MANIFEST} records for it: restore "
            "it from a backup, or start a new sweep"
        )
    return PreparedRun(point, setup, directory)


@contextmanager
def naming(point: GridPoint) -> Iterator[None]:
    """Errors name the run whose settings they are about."""
    try:
        yield
    except InputError as error:
        raise of_run(error, point.values) from error


@dataclass(frozen=True)
class SweepStart:
    """What a sweep is about to do: its directory, the parts to run, and whether it names code."""

    path: Path
    jobs: Sequence[Job]
    names_code: bool


@takes_options
def sweep(
    config: str | Path | Mapping[str, Any] = "quickstart",
    values: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    max_runs: int = MAX_RUNS,
    figures: bool = True,
    on_start: Callable[[SweepStart], None] | None = None,
    on_progress: Callable[[str, Event], None] | None = None,
    **options: Unpack[Options],
) -> Sweep:
    """Run a configuration for every combination of the values of some keys, as ``nufed sweep``.

    Args:
        config: a preset's name, a TOML file, or the same tables as a mapping; its table ``sweep``
            may hold keys and values.
        values: dotted keys, each with a list of values or a range such as ``"0..5"``.
        overrides: ``key=value`` for all runs, or ``key=a,b,c`` and ``key=a..b`` to sweep.
        out: the directory to create; by default the next free ``runs/NAME-sweep-001``.
        max_runs: the largest number of runs to accept.
        figures: whether to also write the charts of the sweep's page as SVG and PNG files.
        on_start: called with a :class:`SweepStart` before training.
        on_progress: called with the run's name and its :class:`nufed.lab.experiment.Event`.
        options: as for :func:`nufed.run`, for all runs; :func:`resume_sweep` resumes a stopped
            sweep.

    Returns:
        The finished sweep, read back from its directory (``sweep.runs``, ``sweep.records()``).
    """
    session = Session.of(options, figures=figures, on_start=on_start, on_progress=on_progress)
    grid = make_grid(config, values, overrides, max_runs=max_runs, methods=session.given.methods)
    loaded = LoadedSamples(session.given)
    with torch_threads(grid.base.threads):
        setups = []
        for point in grid.points:
            check_simulated(point.config)
            with naming(point):
                setups.append(
                    without_engines(session.setup(point.config, loaded(point.config.data)))
                )
        check_comparable(grid, setups)
        configs = zip(grid.points, setups, strict=True)
        grid = replace(grid, points=[replace(p, config=s.config) for p, s in configs])
        path = _create(grid.base.name, None if out is None else Path(out))
        with ExitStack() as stack:
            stack.enter_context(resumed_by(f"nufed sweep --resume {path}"))
            stack.enter_context(locked(path))
            write_manifest(path, grid)
            prepared = [
                prepare_new(path, point, setup, stack)
                for point, setup in zip(grid.points, setups, strict=True)
            ]
            return _train(path, grid, prepared, session)


@takes_options
def resume_sweep(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    trust: bool = False,
    figures: bool = True,
    on_start: Callable[[SweepStart], None] | None = None,
    on_progress: Callable[[str, Event], None] | None = None,
    **options: Unpack[Options],
) -> Sweep:
    """Resume a stopped or killed sweep, to the same bits as an uninterrupted one.

    Finished parts are skipped; runs that had not started are started.

    Args:
        path: the sweep's directory.
        overrides: only ``workers=…``.
        trust: allow importing the code that the directory names, if any: whoever wrote the
            directory can have changed it.
        figures, on_start, on_progress, options: as for :func:`sweep`, with the same objects.
    """
    session = Session.of(
        options, trust=trust, figures=figures, on_start=on_start, on_progress=on_progress
    )
    path = Path(path)
    grid = read_manifest(path)
    workers = _changed_workers(grid, overrides)
    for point in grid.points:
        require_trust(path, session.given.with_placeholders(point.config), trust)
    loaded = LoadedSamples(session.given)
    with ExitStack() as stack:
        stack.enter_context(resumed_by(f"nufed sweep --resume {path}"))
        stack.enter_context(locked(path))
        stack.enter_context(torch_threads(grid.base.threads))
        prepared = [prepare_again(path, point, session, loaded, stack) for point in grid.points]
        for run in prepared:
            if run.new:
                begin_run(run.setup, run.directory)
            else:
                Provenance(run.directory).write_resumed(run.setup.config)
        if workers is not None:
            prepared = [replace(r, setup=replace(r.setup, workers=workers)) for r in prepared]
        return _train(path, grid, prepared, session)


def _train(path: Path, grid: Grid, prepared: Sequence[PreparedRun], session: Session) -> Sweep:
    """Run all unfinished parts; then write the runs' reports, the results and the page."""
    spread = prepared[0].setup.on_ray(session.ray)
    if spread.cluster is not None:
        where, slots = spread.cluster, spread.workers
        prepared = [
            replace(run, setup=replace(run.setup, cluster=where, workers=slots)) for run in prepared
        ]
    jobs = [job for run in prepared for job in run.jobs()]
    if session.on_start:
        code = any(named_code(point.config) for point in grid.points)
        session.on_start(SweepStart(path, jobs, code))
    tell = session.on_progress or (lambda run, event: None)
    workers = min(run.setup.workers for run in prepared)
    with session.training(spread) as stop:
        run_jobs(jobs, workers, lambda job, event: tell(job.directory.path.name, event), stop)
    trained = {job.directory.path.name for job in jobs if job.part.method != BASELINE_PART}
    runs: dict[str, Run] = {}
    unread: dict[str, str] = {}
    for run in prepared:
        name = run.point.name
        try:
            runs[name] = _finished(run, changed=name in trained)
        except RunError as error:  # a part that failed is missing
            unread[name] = str(error)
    finished = Sweep.of(path, grid, runs, unread)
    if left_out := write_results(finished):
        LOG.warning(left_out)
    from nufed.lab.report.sweep_page import build_sweep_page  # charts are slow to import

    build_sweep_page(finished, figures=bool(session.figures))
    return finished


def _finished(run: PreparedRun, *, changed: bool) -> Run:
    """Read a run back; write its results and page if they are missing or outdated."""
    path = run.directory.path
    if not changed and (path / "report.html").exists():
        return load_run(path)
    try:
        setup = run.setup
        return finish(run.directory, setup.objectives, setup.problem.algorithms, figures=False)
    except TrainingError:  # no method could be trained: its failures say why
        return load_run(path)


def _changed_workers(grid: Grid, overrides: Sequence[str]) -> int | None:
    """The number of workers, if ``overrides`` change it."""
    for setting in overrides:
        if setting.partition("=")[0].strip() != "workers":
            raise InputError(
                f"{setting}: a resumed sweep keeps its settings; only workers may be changed"
            )
    if not overrides:
        return None
    return worker_count(read_config(grid.base.model_dump(exclude_none=True), overrides))


def _create(name: str, out: Path | None) -> Path:
    """A new directory for a sweep."""
    if out is not None and (out / MANIFEST).exists():
        raise RunError(
            f"{out} holds a sweep, and a sweep never overwrites: give another --out, or resume it "
            f"with `nufed sweep --resume {out}`"
        )
    return RunDirectory.create(f"{name}-sweep", out).path
