"""A run directory read back: every file against its schema and digest, and the files together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nufed.errors import RunError
from nufed.evaluate import AgentScores, Measure, ScaleChoice, StepSizes
from nufed.runs.begun import Begun
from nufed.runs.directory import RunDirectory
from nufed.runs.files import check_entries, read_lines, read_record
from nufed.runs.part import (
    BASELINE_FILES,
    CHOSEN,
    DONE,
    FILES,
    OPTIONAL,
    STEP_SIZES,
    WARNINGS,
    check_done,
)
from nufed.runs.records import (
    Failure,
    Group,
    MetricsLine,
    ScoresLine,
    SplitRecord,
    StepSizesRecord,
    WarningLine,
    checked,
)
from nufed.runs.results import BASELINES, Run, Trained
from nufed.runs.schema import Config


def load_run(path: Path) -> Run:
    """Read a run directory back.

    What does not fit its schema, its digest or the other files is refused, and the file named.
    """
    check_entries(path)
    directory = RunDirectory(path)
    begun = Begun(directory)
    try:
        about, config = begun.about(), begun.read()
        splits = {seed: directory.read_split(seed) for seed in config.seeds}
    except RunError as error:
        raise RunError(f"{path} can't be read as a run directory: {error}") from error
    reader = _Reader(path, config, splits)
    methods = {name: reader.parts("methods", name) for name in config.algorithms()}
    kept = {name: part for name, part in methods.items() if part}
    baselines = {
        name: reader.parts("baselines", name)
        for name in BASELINES
        if (path / "baselines" / name).is_dir()
    }
    measure = about.measure
    return Run(
        path=path,
        config=config,
        # of the metric only its name and direction matter from here on
        measure=Measure(measure.name, _known if measure.higher_is_better else None),
        software=begun.software(),
        engines=dict(about.engines),
        data_sha256=about.data_sha256,
        inputs=about.inputs if isinstance(about.inputs, dict) else about.inputs.model_dump(),
        splits={seed: split.model_dump() for seed, split in splits.items()},
        methods=kept,
        baselines=baselines,
        timing=directory.timing(),
        failures=list(_failures(path, config)),
    )


def _known(outputs: Any, targets: Any) -> float:
    raise AssertionError("scores of a finished run are read, not computed")


def _failures(path: Path, config: Config) -> Iterator[str]:
    """Every method and seed that could not be trained, in words."""
    for name in config.algorithms():
        for seed in config.seeds:
            file = path / "methods" / name / f"seed-{seed}" / "failure.json"
            if file.exists():
                failure = read_record(file, Failure)
                warned = [f"; warned in round {w.round}: {w.message}" for w in failure.warnings]
                yield f"{name}, seed {seed}: {failure.reason}{''.join(warned)}"


class _Reader:
    """Reads the parts of a run, and refuses what does not fit to the others."""

    def __init__(self, path: Path, config: Config, splits: Mapping[int, SplitRecord]) -> None:
        self._path, self._config, self._splits = path, config, splits
        self._agents: dict[int, list[int]] = {}  # that the first part of a seed has scores of
        self._groups: set[bool] | None = None  # whether they were seen, in the first part of all
        self._evaluated: list[list[Group]] | None = None  # groups by round, in the first method

    def parts(self, kind: str, name: str) -> dict[int, Trained]:
        """What there is of a method or baseline, by seed, but for seeds that failed."""
        folders = {s: self._path / kind / name / f"seed-{s}" for s in self._config.seeds}
        if kind == "baselines":
            return {
                seed: self._part(folder, seed, BASELINE_FILES) for seed, folder in folders.items()
            }
        return {
            seed: self._part(folder, seed, FILES)
            for seed, folder in folders.items()
            if not (folder / "failure.json").exists()
        }

    def _part(self, folder: Path, seed: int, files: Sequence[str]) -> Trained:
        how = f"continue with `nufed run --resume {self._path}`"
        if not (folder / DONE).exists():
            raise RunError(f"{folder} is not finished: {how}")
        done = check_done(folder)
        if done.files.keys() - set(OPTIONAL) != set(files):
            raise RunError(f"{folder / DONE} does not fit: it must list {', '.join(files)}")
        if done.rounds < self._config.rounds:
            raise RunError(f"{folder} is not finished, {DONE} has {done.rounds} rounds: {how}")
        if done.rounds > self._config.rounds:
            raise RunError(f"{folder / DONE} does not fit: it is about {done.rounds} rounds")
        scores = self._scores(folder / "agents.jsonl", seed)
        metrics = self._metrics(folder / "metrics.jsonl") if "metrics.jsonl" in files else []
        chosen = self._scores(folder / CHOSEN, seed) if CHOSEN in done.files else None
        sizes = self._step_sizes(folder, chosen is not None) if STEP_SIZES in done.files else None
        if chosen and sizes is None:
            raise RunError(f"{folder / DONE} does not fit: it lists {CHOSEN} without {STEP_SIZES}")
        warned = read_lines(folder / WARNINGS, WarningLine) if WARNINGS in done.files else []
        return Trained(metrics, scores, chosen, sizes, [line.model_dump() for line in warned])

    def _step_sizes(self, folder: Path, of_fine_tuning: bool) -> StepSizes:
        """The step sizes of fine-tuning, for every number of steps; else that of training alone."""
        path = folder / STEP_SIZES
        found = checked(StepSizesRecord, path.read_bytes(), path)
        steps = range(1, self._config.steps_evaluated + 1) if of_fine_tuning else [0]
        if [own.steps for own in found.chosen] != list(steps):
            raise RunError(f"{path} does not fit: it must have a choice for steps {list(steps)}")
        if {own.scale for own in found.chosen} - set(found.tried):
            raise RunError(f"{path} does not fit: a scale was chosen that was not tried")
        chosen = tuple(ScaleChoice(**dict(own)) for own in found.chosen)
        return StepSizes(tuple(found.tried), chosen, found.gradients)

    def _scores(self, path: Path, seed: int) -> list[AgentScores]:
        lines = read_lines(path, ScoresLine)
        split, steps = self._splits[seed], self._config.steps_evaluated + 1
        unseen = set(split.unseen)
        for line in lines:
            if line.agent >= split.number or line.seen == (line.agent in unseen):
                raise RunError(
                    f"{path} does not fit to splits/seed-{seed}.json: agent {line.agent} differs"
                )
            if len(line.score) != steps:
                raise RunError(f"{path} does not fit: scores must be {steps} numbers")
        agents = sorted(line.agent for line in lines)
        groups = {line.seen for line in lines}
        if agents != self._agents.setdefault(seed, sorted(set(agents))):
            raise RunError(f"{path} does not fit: it is not about the same agents as other parts")
        if self._groups is None:
            self._groups = groups
        if groups != self._groups or (groups and True not in groups):
            raise RunError(f"{path} does not fit: it lacks scores of agents seen in training")
        return [_agent_scores(line) for line in lines]

    def _metrics(self, path: Path) -> list[dict[str, Any]]:
        lines = read_lines(path, MetricsLine)
        if [line.round for line in lines] != list(range(self._config.rounds + 1)):
            raise RunError(f"{path} does not fit: it must have a line for every round")
        steps = self._config.steps_evaluated + 1
        for line in lines:
            every = [*line.evaluation.values(), *line.evaluation_chosen.values()]
            if any(len(curves.score) != steps for curves in every):
                raise RunError(f"{path} does not fit: evaluations must be {steps} numbers")
            if line.evaluation_chosen and line.evaluation_chosen.keys() != line.evaluation.keys():
                raise RunError(f"{path} does not fit: evaluations are not of the same groups")
        evaluated = [[*sorted(line.evaluation), *sorted(line.evaluation_chosen)] for line in lines]
        if self._evaluated is None:
            self._evaluated = evaluated
        if evaluated != self._evaluated:
            raise RunError(f"{path} does not fit: evaluations are not of the rounds of other parts")
        return [line.model_dump(exclude_unset=True) for line in lines]


def _agent_scores(line: ScoresLine) -> AgentScores:
    fields: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in dict(line).items()
    }
    return AgentScores(**fields)
