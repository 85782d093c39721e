"""The runs of a sweep before they are trained: setups that share data, checks, and their parts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from nufed.config.build import build_samples
from nufed.config.problem import Given, Problem, Recorded
from nufed.config.schema import OWN, DataConfig
from nufed.config.sweep_grid import Grid, GridPoint, in_words, of_run
from nufed.data import Samples, as_samples
from nufed.errors import InputError, RunError, TrainingError, in_short
from nufed.experiment.jobs import Job
from nufed.experiment.observers import Listener
from nufed.experiment.run_directories import begin_run, reopen_run
from nufed.experiment.run_parts import BASELINE_PART, parts_of
from nufed.experiment.setup import Setup
from nufed.experiment.stopping import Stop
from nufed.files import locked
from nufed.runs import RunDirectory
from nufed.runs.part_files import PartFiles
from nufed.runs.sweep_record import MANIFEST, run_path

LOG = logging.getLogger("nufed")


@dataclass(frozen=True)
class SweepJob(Job):
    """A part of a run of a sweep. If it fails, the others continue."""

    def __str__(self) -> str:
        return f"{self.directory.path.name}: {self.part}"

    @property
    def run(self) -> Callable[[Listener, int, Stop], None]:
        return self._run

    def _run(self, listener: Listener, workers: int, stop: Stop) -> None:
        """Run the part on engines of its own, whose memory is freed at its end."""
        engines = {self.part.seed: self.setup.engines[self.part.seed].fresh()}
        job = Job(replace(self.setup, engines=engines), self.directory, self.part)
        try:
            job.run(listener, workers, stop)
        except RunError:  # for example a full disk, which the others would find, too
            raise
        except Exception as error:  # the user's model, loss, metric or algorithm may raise anything
            reason = str(error) if isinstance(error, TrainingError) else in_short(error)
            if self.part.method != BASELINE_PART:
                self.directory.write_failure(self.part.method, self.part.seed, reason)
            LOG.warning("%s failed: %s", self, reason)


@dataclass(frozen=True)
class LoadedSamples:
    """Data by its source, so that runs with the same data share it."""

    given: Given
    _found: dict[str, Samples] = field(default_factory=dict)

    def __call__(self, data: DataConfig) -> Samples | None:
        """The samples; None if they were given in Python then but not now."""
        if self.given.data is None and data.source == OWN:
            return None
        key = json.dumps([data.source, data.args], sort_keys=True, default=repr)
        if self.given.data is not None:
            key = OWN
        if key not in self._found:
            own = self.given.data
            self._found[key] = build_samples(data) if own is None else as_samples(own)
        return self._found[key]


@dataclass(frozen=True)
class PreparedRun:
    """A run of a sweep that can start."""

    point: GridPoint
    setup: Setup
    directory: RunDirectory
    new: bool = False

    def jobs(self) -> Iterator[SweepJob]:
        """Its unfinished parts."""
        for part in parts_of(self.setup):
            if part.method != BASELINE_PART:
                folder = self.directory.part("methods", part.method, part.seed)
                files = PartFiles(folder, self.setup.problem.belongs_to(part.seed))
                if files.is_done(self.setup.config.rounds):
                    continue
            yield SweepJob(self.setup, self.directory, part)


def light(setup: Setup) -> Setup:
    """The same without the engines made for its checks: a sweep holds the setups of all runs."""
    return replace(setup, engines={seed: e.fresh() for seed, e in setup.engines.items()})


def check_comparable(grid: Grid, setups: Sequence[Setup]) -> None:
    """Refuse runs whose scores can't be compared, and runs that are the same."""
    measured = {(s.measure.name, s.config.eval_on): s for s in setups}
    if len(measured) > 1:
        words = " and ".join(f"{on} {name}" for name, on in measured)
        raise InputError(
            f"the runs have different scores ({words}), which can't be compared: sweep other keys"
        )
    first: dict[tuple[str, int], GridPoint] = {}
    for point, setup in zip(grid.points, setups, strict=True):
        same = first.setdefault((setup.config.fingerprint, setup.config.rounds), point)
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
    path: Path, point: GridPoint, given: Given, loaded: LoadedSamples, trust: bool, stack: ExitStack
) -> PreparedRun:
    """A run of a sweep to resume, or one whose directory is still to be written (``new``)."""
    directory = RunDirectory(run_path(path, point.name))
    if not (directory.path / "run.json").exists():
        recorded = Recorded(path, point.config, "", {})
        recorded.check_given(given, ("data.source", "data.partition", "model.name", "loss"))
        problem = Problem.make(point.config, given, None, loaded(point.config.data))
        setup = light(Setup.make(problem))
        if not directory.path.exists():
            RunDirectory.create(point.name, directory.path)
        stack.enter_context(locked(directory.path))
        return PreparedRun(point, setup, directory, new=True)
    stack.enter_context(locked(directory.path))
    setup = light(reopen_run(directory, (), given, trust=trust, load_samples=loaded))
    then, now = point.config, setup.config
    if (then.fingerprint, then.rounds) != (now.fingerprint, now.rounds):
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
