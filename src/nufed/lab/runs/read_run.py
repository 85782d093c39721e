"""Reads a run directory, whether finished or still training.

Every file's schema and digest is checked, and that the files agree. :func:`training_state` tells
how far a run is: which methods and seeds are done, and the rounds of the others so far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nufed.errors import RunError
from nufed.evaluate import AgentScores, Measure, StepSizes
from nufed.lab.config.schema import Config
from nufed.lab.runs.directory import RunDirectory
from nufed.lab.runs.finished_run import BASELINES, Run
from nufed.lab.runs.json_files import check_entries, checked, read_lines, read_record
from nufed.lab.runs.part_files import (
    BASELINE_FILES,
    CHOSEN_FILE,
    DONE,
    FILES,
    FITS_FILE,
    GUESSES_FILE,
    OPTIONAL,
    RESAMPLED_FILE,
    STEP_SIZES_FILE,
    WARNINGS_FILE,
    check_done,
)
from nufed.lab.runs.provenance import Provenance
from nufed.lab.runs.records import (
    FITS,
    GUESSES,
    SCORES,
    STEP_SIZES,
    Failure,
    Group,
    Inputs,
    MetricsLine,
    ResampledLine,
    SplitRecord,
    WarningLine,
)
from nufed.lab.runs.results import Trained


def load_run(path: str | Path, *, trust: bool = False, partial: bool = False) -> Run:
    """Read a run directory back.

    A file that violates its schema or digest or contradicts other files is refused and named.
    ``trust`` allows importing the algorithms that it names as ``package.module:Class``, if any.
    ``partial`` reads a run that is not finished, without the methods and seeds that are not, which
    ``unfinished`` then names.
    """
    path = Path(path)
    check_entries(path)
    directory = RunDirectory(path)
    provenance = Provenance(directory)
    try:
        about, config = provenance.about(), provenance.read(trust)
        # a federation writes its split last
        seeds = [s for s in config.seeds if not partial or directory.split_file(s).exists()]
        splits = {seed: directory.read_split(seed) for seed in seeds}
    except RunError as error:
        raise RunError(f"{path} can't be read as a run directory: {error}") from error
    reader = _Reader(path, config, splits, partial)
    methods = {name: reader.parts("methods", name) for name in config.algorithms()}
    kept = {name: part for name, part in methods.items() if part}
    baselines = {
        name: reader.parts("baselines", name)
        for name in BASELINES
        if (path / "baselines" / name).is_dir()
    }
    baselines = {name: part for name, part in baselines.items() if len(part) == len(config.seeds)}
    failed = dict(_failures(path, config))
    unfinished = [
        f"{name}, seed {seed}"
        for name, part in methods.items()
        for seed in config.seeds
        if seed not in part and (name, seed) not in failed
    ]
    measure = about.measure
    return Run(
        path=path,
        config=config,
        # only the metric's name and direction are used from here on
        measure=Measure(measure.name, _never_called if measure.higher_is_better else None),
        software=provenance.software(),
        engines=dict(about.engines),
        data_sha256=about.data_sha256,
        inputs=about.inputs if isinstance(about.inputs, Inputs) else None,
        data_warnings=tuple(about.data_warnings),
        splits=splits,
        methods=kept,
        baselines=baselines,
        timing=directory.timing(),
        failures=list(failed.values()),
        unfinished=tuple(unfinished),
    )


def _never_called(outputs: Any, targets: Any) -> float:
    raise AssertionError("scores of a finished run are read, not computed")


def load_finished(path: str | Path, *, trust: bool = False) -> Run:
    """The finished methods and seeds of a run, of which there must be one."""
    run = load_run(path, trust=trust, partial=True)
    if run.unfinished and not run.methods:
        raise RunError(f"no method of {path} is finished: wait, or resume it if it was stopped")
    return run


def _failures(path: Path, config: Config) -> Iterator[tuple[tuple[str, int], str]]:
    """Every method and seed that could not be trained, and why, as text."""
    for name in config.algorithms():
        for seed in config.seeds:
            file = path / "methods" / name / f"seed-{seed}" / "failure.json"
            if file.exists():
                failure = read_record(file, Failure)
                warned = [f"; warned in round {w.round}: {w.message}" for w in failure.warnings]
                yield (name, seed), f"{name}, seed {seed}: {failure.reason}{''.join(warned)}"


class _Reader:
    """Reads the parts of a run and checks that they are consistent."""

    def __init__(
        self, path: Path, config: Config, splits: Mapping[int, SplitRecord], partial: bool
    ) -> None:
        self._path, self._config, self._splits, self._partial = path, config, splits, partial
        # taken from the part that is read first; all others must agree
        self._agents: dict[int, list[int]] = {}  # agents with scores, by seed
        self._groups: set[bool] | None = None  # values of ``seen`` among them
        self._evaluated: list[list[list[Group]]] = []  # evaluated groups by round, of trainings
        self._resamples: set[int] = set()  # their number

    def parts(self, kind: str, name: str) -> dict[int, Trained]:
        """A method or baseline by seed, without seeds that failed."""
        folders = {s: self._path / kind / name / f"seed-{s}" for s in self._config.seeds}
        rounds = self._config.rounds_of(name)
        if self._partial:
            folders = {s: folder for s, folder in folders.items() if _is_done(folder, rounds)}
        if kind == "baselines":
            return {
                seed: self._part(folder, seed, BASELINE_FILES, rounds)
                for seed, folder in folders.items()
            }
        return {
            seed: self._part(folder, seed, FILES, rounds)
            for seed, folder in folders.items()
            if not (folder / "failure.json").exists()
        }

    def _part(self, folder: Path, seed: int, files: Sequence[str], rounds: int) -> Trained:
        how = f"resume it with `nufed run --resume {self._path}`"
        if not (folder / DONE).exists():
            raise RunError(f"{folder} is not finished: {how}")
        done = check_done(folder)
        if done.files.keys() - set(OPTIONAL) != set(files):
            raise RunError(f"{folder / DONE} is invalid: it must list {', '.join(files)}")
        if done.rounds < rounds:
            raise RunError(f"{folder} is not finished, {DONE} has {done.rounds} rounds: {how}")
        if done.rounds > rounds:
            raise RunError(
                f"{folder / DONE} is invalid: rounds = {done.rounds}, must be at most {rounds}"
            )
        scores = self._scores(folder / "agents.jsonl", seed)
        trained = done.rounds if done.trained is None else done.trained
        if (done.trained is not None and self._config.stop_when is None) or (
            done.shown is not None
        ) != (self._config.keep == "best" and files == FILES):
            raise RunError(f"{folder / DONE} contradicts the keys stop_when and keep of the run")
        metrics = self._metrics(folder / "metrics.jsonl", trained) if files == FILES else []
        if done.shown is not None and done.shown > trained:
            raise RunError(f"{folder / DONE} is invalid: shown must be at most {trained}")
        chosen = self._scores(folder / CHOSEN_FILE, seed) if CHOSEN_FILE in done.files else None
        sizes = None
        if STEP_SIZES_FILE in done.files:
            sizes = self._step_sizes(folder / STEP_SIZES_FILE, chosen is not None)
        elif chosen:
            raise RunError(
                f"{folder / DONE} is invalid: it lists {CHOSEN_FILE} without {STEP_SIZES_FILE}"
            )

        fits = read_lines(folder / FITS_FILE, FITS) if FITS_FILE in done.files else []
        if any(len(fit.predicted) != self._config.steps_evaluated + 1 for fit in fits):
            raise RunError(f"{folder / FITS_FILE} is invalid: it must have a curve for every step")
        part = Trained(metrics, scores, chosen, sizes, fits=fits, shown=done.shown)
        if GUESSES_FILE in done.files:
            guesses = read_lines(folder / GUESSES_FILE, GUESSES)
            if any(len(each.guessed) != self._config.steps_evaluated + 1 for each in guesses):
                raise RunError(f"{folder / GUESSES_FILE} is invalid: it must have every step")
            part = replace(part, guesses=guesses)
        if WARNINGS_FILE in done.files:
            part = replace(part, warnings=read_lines(folder / WARNINGS_FILE, WarningLine))
        if RESAMPLED_FILE in done.files:
            part = self._resampled(part, folder / RESAMPLED_FILE)
        return part

    def _resampled(self, trained: Trained, path: Path) -> Trained:
        """The part with the resamples of the scores that results show."""
        lines = read_lines(path, ResampledLine)
        by_agent: dict[int, Any] = {line.agent: line.scores for line in lines}
        steps = self._config.steps_evaluated + 1
        self._resamples |= {len(numbers) for scores in by_agent.values() for numbers in scores}
        if by_agent.keys() != {s.agent for s in trained.final}:
            scored = CHOSEN_FILE if trained.chosen else "agents.jsonl"
            raise RunError(f"{path} contradicts {scored}: their agents differ")
        if (
            any(len(scores) not in (0, steps) for scores in by_agent.values())
            or len(self._resamples) > 1
            or 0 in self._resamples
        ):
            raise RunError(
                f"{path} is invalid: it must have {steps} lists for every agent, all of one length"
            )
        final = [replace(s, resampled=by_agent[s.agent]) for s in trained.final]
        return replace(trained, chosen=final) if trained.chosen else replace(trained, scores=final)

    def _step_sizes(self, path: Path, of_fine_tuning: bool) -> StepSizes:
        """Step sizes of fine-tuning, for every number of steps; else that of local training."""
        sizes = checked(STEP_SIZES, path.read_bytes(), path)
        steps = range(1, self._config.steps_evaluated + 1) if of_fine_tuning else [0]
        if [choice.steps for choice in sizes.chosen] != list(steps):
            raise RunError(f"{path} is invalid: it must have a choice for steps {list(steps)}")
        if {choice.scale for choice in sizes.chosen} - {0.0, *sizes.tried}:
            raise RunError(f"{path} is invalid: a scale was chosen that was not tried")
        return sizes

    def _scores(self, path: Path, seed: int) -> list[AgentScores]:
        lines = read_lines(path, SCORES)
        split, steps = self._splits[seed], self._config.steps_evaluated + 1
        unseen = set(split.unseen)
        for line in lines:
            if line.agent >= split.number or line.seen == (line.agent in unseen):
                raise RunError(
                    f"{path} contradicts splits/seed-{seed}.json: agent {line.agent} differs"
                )
            if len(line.score) != steps:
                raise RunError(f"{path} is invalid: scores must be {steps} numbers")
        agents = sorted(line.agent for line in lines)
        groups = {line.seen for line in lines}
        if agents != self._agents.setdefault(seed, sorted(set(agents))):
            raise RunError(f"{path} is invalid: its agents differ from those of other parts")
        if self._groups is None:
            self._groups = groups
        if groups != self._groups or (groups and True not in groups):
            raise RunError(f"{path} is invalid: it lacks scores of agents seen in training")
        return lines

    def _metrics(self, path: Path, rounds: int) -> list[MetricsLine]:
        lines = read_lines(path, MetricsLine)
        if [line.round for line in lines] != list(range(rounds + 1)):
            raise RunError(f"{path} is invalid: it must have a line for every round")
        steps = self._config.steps_evaluated + 1
        for line in lines:
            every = [*line.evaluation.values(), *line.evaluation_chosen.values()]
            if any(len(curves.score) != steps for curves in every):
                raise RunError(f"{path} is invalid: evaluations must be {steps} numbers")
            if line.evaluation_chosen and line.evaluation_chosen.keys() != line.evaluation.keys():
                raise RunError(f"{path} is invalid: evaluations must have the same groups")
        if self._config.stop_when is not None or self._config.keep == "best":
            return lines  # methods may end, and have step sizes chosen, in other rounds
        evaluated = [[*sorted(line.evaluation), *sorted(line.evaluation_chosen)] for line in lines]
        for other in self._evaluated:
            fewer = min(len(evaluated), len(other))  # of the shorter training all but its last
            both = fewer if len(evaluated) == len(other) else fewer - 1
            if evaluated[:both] == other[:both]:
                continue
            raise RunError(f"{path} is invalid: evaluated rounds differ from those of other parts")
        if evaluated not in self._evaluated:
            self._evaluated.append(evaluated)
        return lines


def _is_done(folder: Path, rounds: int) -> bool:
    return (folder / DONE).exists() and check_done(folder).rounds == rounds


# files of a run directory whose change is progress
WATCHED = (
    "run.json",
    "bounds.json",
    "methods/*/seed-*/metrics.jsonl",
    "methods/*/seed-*/done.json",
    "methods/*/seed-*/failure.json",
    "baselines/*/seed-*/done.json",
)


@dataclass(frozen=True)
class PartState:
    """One method and seed: "done", "failed", "training" or "waiting", and its rounds so far."""

    method: str
    seed: int
    state: str
    metrics: list[MetricsLine]


@dataclass(frozen=True)
class TrainingState:
    """A run and its parts; ``run`` has only those that are done."""

    run: Run
    parts: list[PartState]

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train, and a report can be made."""
        done = all(part.state in ("done", "failed") for part in self.parts)
        return done and bool(self.run.methods) and not self.missing_baselines()

    def missing_baselines(self) -> list[str]:
        """The null baselines that were begun and are not done."""
        begun = self.run.path / "baselines"
        names = sorted(path.name for path in begun.iterdir()) if begun.is_dir() else []
        return [name for name in names if name not in self.run.baselines]

    def with_rounds_so_far(self) -> Run:
        """The run with the rounds, but no final scores, of parts that are not done."""
        methods: dict[str, dict[int, Trained]] = {}
        for part in self.parts:
            if part.metrics:
                done = self.run.methods.get(part.method, {}).get(part.seed)
                trained = done or Trained(part.metrics, [])
                methods.setdefault(part.method, {})[part.seed] = trained
        return replace(self.run, methods=methods)


def training_state(path: Path, *, trust: bool = False) -> TrainingState:
    """Read a run that may still be training; takes no lock and writes nothing."""
    run = load_run(path, trust=trust, partial=True)
    return TrainingState(run, list(_parts(run)))


def _parts(run: Run) -> Iterator[PartState]:
    for method in run.config.algorithms():
        for seed in run.config.seeds:
            folder = run.path / "methods" / method / f"seed-{seed}"
            if seed in run.methods.get(method, {}):
                yield PartState(method, seed, "done", run.methods[method][seed].metrics)
                continue
            metrics = rounds_so_far(folder / "metrics.jsonl")
            failed = (folder / "failure.json").exists()
            state = "failed" if failed else "training" if metrics else "waiting"
            yield PartState(method, seed, state, metrics)


def rounds_so_far(path: Path) -> list[MetricsLine]:
    """The complete lines of a metrics file that may be being written, up to an invalid one."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")  # the last one has no end
    except OSError:
        return []
    rounds: list[MetricsLine] = []
    for number, line in enumerate(lines):
        try:
            rounds.append(checked(MetricsLine, line, path, number + 1))
        except RunError:
            break
    return rounds


def version_of(path: Path) -> str:
    """A text that changes when the run makes progress: sizes and times of its files."""
    seen = []
    for pattern in WATCHED:
        for file in sorted(path.glob(pattern)):
            try:
                about = file.stat()
            except OSError:  # removed by a resume since
                continue
            seen.append((str(file), about.st_size, about.st_mtime_ns))
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]
