"""The independent parts of a run: each method, and the null baselines, for each seed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nufed.errors import NumericalWarning, TrainingError
from nufed.evaluate import evaluation_context
from nufed.experiment.baselines import baselines, local_training
from nufed.experiment.evaluation import Final, evaluate_round, with_fits
from nufed.experiment.observers import Event, Listener
from nufed.experiment.setup import Setup
from nufed.experiment.stopping import Stop
from nufed.runs import RunDirectory
from nufed.runs.part_files import PartFiles
from nufed.runs.personal_models import personal_after, write_personal
from nufed.runs.recorder import Recorder, is_due
from nufed.runs.validation_scores import ValidationScores
from nufed.server import to_send
from nufed.simulation import Engine, EngineName, RayEngine, WorkerEngine, train

BASELINE_PART = "null baselines"


@dataclass(frozen=True)
class RunPart:
    """One method (or the null baselines) with one seed, and an estimate of its work."""

    seed: int
    method: str
    work: float

    def __str__(self) -> str:
        return f"{self.method} with seed {self.seed}"


def parts_of(setup: Setup) -> list[RunPart]:
    """The parts of a run, seed by seed."""
    config, agents = setup.config, len(setup.federations[setup.config.seeds[0]].split.agents)
    evaluated = len(setup.evaluated[config.seeds[0]])
    works: dict[str, float] = {}
    if config.baselines:
        local = "local" in config.baselines
        alone = local_training(setup)
        works[BASELINE_PART] = float(evaluated * (alone.local_epochs or alone.local_steps) * local)
    for name, algorithm in setup.algorithms.items():
        batches = sum(draw.number for draw in algorithm.update_draws()) or 1
        works[name] = config.rounds * config.participation * agents * batches
    return [RunPart(seed, name, work) for seed in config.seeds for name, work in works.items()]


def part_files(setup: Setup, part: RunPart, directory: RunDirectory) -> dict[str, PartFiles]:
    """The files of a part by the name of the method, or of each null baseline."""
    kind, names = "methods", [part.method]
    if part.method == BASELINE_PART:
        kind, names = "baselines", setup.baselines()
    return {name: _files(setup, directory, kind, name, part.seed) for name in names}


def run_method(
    setup: Setup,
    part: RunPart,
    directory: RunDirectory,
    listener: Listener,
    workers: int,
    stop: Stop,
) -> None:
    """Train and evaluate a method with one seed, with ``workers`` processes; write its results.

    A finished one is skipped; an interrupted one resumes from its last checkpoint.
    """
    config, name, seed = setup.config, part.method, part.seed
    event, steps = Event(seed, name, 0), config.steps_of(name)[0]
    files = part_files(setup, part, directory)[name]
    if files.is_done(config.rounds):
        listener(Event(seed, name, config.rounds, starts=True))
        return
    began, algorithm = time.perf_counter(), setup.algorithms[name]

    def doubt(round: int, message: str) -> None:
        files.warnings.append({"round": round, "message": message})
        warnings.warn(f"{name}, seed {seed}: {message}", NumericalWarning, stacklevel=2)

    with (
        open_engine(setup, seed, setup.engine_names[name], workers) as engine,
        _failure_written(directory, part, files),
        Recorder(directory, files, config, name, algorithm, seed) as recorder,
    ):
        objective = engine.objective
        start = recorder.resume(lambda: algorithm.initial_server(objective, objective.initial()))
        for line in files.lines():
            event = event.after(line, steps)
        listener(replace(event, starts=True))
        training = train(
            algorithm,
            engine,
            objective.initial(),
            rounds=config.rounds,
            participation=config.participation,
            start=start,
            states=files.states,
            rules=setup.rules,
            faults=setup.faults,
            label=f"{name}, seed {seed}",
            on_doubt=doubt,
        )
        del start  # frees its vectors after the first round
        for progress in training:
            if recorder.is_done(progress):
                continue
            entries, final = dict[str, Any](), None
            if recorder.is_evaluated(progress):
                entries, final = evaluate_round(setup, engine, name, progress, recorder)
            save = is_due(config.checkpoint_every, progress.round) or recorder.is_kept(progress)
            last = stop() or final is not None  # asked once: the round it ends at is saved
            recorded = recorder.record(progress, entries, checkpoint=save or last)
            if final:
                _write_personal(setup, engine, name, final, files.folder)
                curves = with_fits(setup, engine, name, final)
                recorder.finish(curves, progress, final.shown)
            event = event.after(recorded, steps) if recorded else event
            listener(replace(event, last=final is not None))
            if last:
                break
        directory.write_timing(method=name, seed=seed, seconds=time.perf_counter() - began)


def run_baselines(
    setup: Setup,
    part: RunPart,
    directory: RunDirectory,
    listener: Listener,
    workers: int,
    stop: Stop,
) -> None:
    """Evaluate the unfinished null baselines with one seed, and write their results."""
    rounds, seed = setup.config.rounds, part.seed
    listener(Event(seed, part.method, 0, starts=True))
    files = part_files(setup, part, directory)
    missing = [name for name, own in files.items() if not own.is_done(rounds)]
    if missing:
        with _engines(setup, seed, workers) as get_engine, stop.immediately():
            for name, evaluation in baselines(setup, seed, get_engine, missing):
                files[name].finish_baseline(rounds, evaluation)


@contextmanager
def _engines(setup: Setup, seed: int, workers: int) -> Iterator[Callable[[EngineName], Engine]]:
    """A function that gives the engines of a seed, with ``workers`` processes."""
    with ExitStack() as stack:

        def get_engine(name: EngineName) -> Engine:
            engine = setup.engines[seed].get(name)
            rebuild = partial(_engine_of, setup, seed, name)
            if setup.cluster is not None:
                return stack.enter_context(RayEngine(setup.cluster, engine, rebuild))
            if workers == 1:
                return engine
            return stack.enter_context(WorkerEngine(engine, workers, rebuild))

        yield get_engine


def _engine_of(setup: Setup, seed: int, name: EngineName) -> Engine:
    return setup.engines[seed].get(name)


@contextmanager
def open_engine(setup: Setup, seed: int, name: EngineName, workers: int) -> Iterator[Engine]:
    """An engine of a seed, with ``workers`` processes."""
    with _engines(setup, seed, workers) as get_engine:
        yield get_engine(name)


@contextmanager
def _failure_written(directory: RunDirectory, part: RunPart, files: PartFiles) -> Iterator[None]:
    """Write why training failed, so that the other methods continue."""
    try:
        yield
    except TrainingError as error:
        directory.write_failure(part.method, part.seed, str(error), files.warnings)


def _write_personal(setup: Setup, engine: Engine, name: str, final: Final, folder: Path) -> None:
    """Write the personal models of all agents that have a state, as results show them.

    Other agents' are made from the global model, and can be recomputed.
    """
    config, federation, algorithm = setup.config, engine.federation, setup.algorithms[name]
    steps, (shown, evaluation) = config.steps_of(name)[0], final
    received, states, scale = (
        to_send(algorithm, shown.server),
        shown.states,
        evaluation.scale(steps),
    )
    about = {"method": name, "round": shown.round, "fine_tuning_steps": steps, "lr_scale": scale}
    for agent in states.agents():
        batches = federation.batches(agent, engine.seed, "evaluate")
        own = evaluation_context(federation, engine.objective, batches, batches.samples)
        tensors = personal_after(algorithm, own, received, states.get(agent), steps, scale)
        write_personal(folder, agent, tensors, about)


def _files(setup: Setup, directory: RunDirectory, kind: str, name: str, seed: int) -> PartFiles:
    config, scores = setup.config, None
    if kind == "methods" and setup.validates:
        higher, best = setup.measure.higher_is_better, config.keep == "best"
        scores = ValidationScores(higher, config.stop_when, best)
    return PartFiles(directory.part(kind, name, seed), setup.problem.belongs_to(seed), scores)
