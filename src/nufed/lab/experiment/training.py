"""The jobs of a run: every method, and the null baselines, with every seed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

from nufed.errors import NumericalWarning, TrainingError
from nufed.evaluate.step_size import INITIAL_REACH
from nufed.lab.config.load import no_mixed_precision
from nufed.lab.experiment.evaluation import Evaluator, baselines, local_training
from nufed.lab.experiment.jobs import BASELINE_PART, Job, RunPart
from nufed.lab.experiment.observers import Event, Listener
from nufed.lab.experiment.session import Stop
from nufed.lab.experiment.setup import Setup
from nufed.lab.runs import RunDirectory
from nufed.lab.runs.part_files import PartFiles, Recorder, ValidationScores, is_due
from nufed.objective import Batch
from nufed.objective.modules import has_kernels
from nufed.server import Progress, initial_server
from nufed.simulation import Engine, EngineName, RayEngine, Training, WorkerEngine


def parts_of(setup: Setup) -> list[RunPart]:
    """The parts of a run, seed by seed."""
    config, agents = setup.config, len(setup.federations[setup.config.seeds[0]].split.agents)
    evaluated = len(setup.evaluated[config.seeds[0]])
    works: dict[str, float] = {}
    if config.baselines:
        alone = local_training(setup)
        # tuned, it is trained with every coarse step size, and again with the chosen one
        times = 2 * INITIAL_REACH + 2 if config.tune_local else 1
        steps = (alone.local_epochs or alone.local_steps) * ("local" in config.baselines)
        works[BASELINE_PART] = float(evaluated * steps * times)
    for name, algorithm in setup.algorithms.items():
        batches = sum(draw.number for draw in algorithm.update_draws()) or 1
        works[name] = config.rounds_of(name) * config.participation * agents * batches
    return [RunPart(seed, name, work) for seed in config.seeds for name, work in works.items()]


def job_of(setup: Setup, directory: RunDirectory, part: RunPart) -> Job:
    """The job of a part of a run."""
    kind = BaselineJob if part.method == BASELINE_PART else MethodJob
    return kind(setup, directory, part)


def jobs_of(setup: Setup, directory: RunDirectory) -> list[Job]:
    """The jobs of a run, seed by seed."""
    return [job_of(setup, directory, part) for part in parts_of(setup)]


TRIAL_TURNS = 5  # gradients with each setting that a trial times
Finish: TypeAlias = Callable[[], None]
"""Writes the results of a training after its last round."""


class MethodJob(Job):
    """Trains a method with one seed from its last checkpoint, and records and evaluates its rounds.

    Trainings that are scored and recorded in another way override :meth:`files`,
    :meth:`recording` and :meth:`evaluate`.
    """

    checks_curvature: ClassVar[bool] = True

    def __call__(self, listener: Listener, workers: int, stop: Stop) -> None:
        setup, name, seed = self.setup, self.part.method, self.part.seed
        config, algorithm = setup.config, setup.algorithms[name]
        event, steps = Event(seed, name, 0), config.steps_of(name)[0]
        if self.is_done():
            listener(replace(event, round=config.rounds_of(name), starts=True))
            return
        with self.recording() as recorder, open_engines(setup, seed, workers) as get_engine:
            engine, files = get_engine(setup.engine_names[name]), recorder.files
            objective = engine.objective
            start = recorder.resume(
                lambda: initial_server(algorithm, objective, objective.initial())
            )
            for line in files.lines():
                event = event.after(line, steps)
            listener(replace(event, starts=True))
            training = Training(
                algorithm,
                engine,
                config.participation,
                setup.rules,
                setup.faults,
                label=f"{name}, seed {seed}",
                on_doubt=partial(self._doubt, files) if self.checks_curvature else None,
            )
            progress = start or training.start(objective.initial(), files.states)
            del start  # frees its vectors after the first round
            while True:
                if not recorder.is_done(progress):
                    entries, finish = dict[str, Any](), None
                    if recorder.is_evaluated(progress):
                        entries, finish = self.evaluate(engine, progress, recorder)
                    due = is_due(config.checkpoint_every, progress.round)
                    last = stop() or finish is not None  # once: the last round is saved
                    save = due or last or recorder.is_kept(progress)
                    recorded = recorder.record(progress, entries, checkpoint=save)
                    if finish is not None:
                        finish()
                    event = event.after(recorded, steps) if recorded else event
                    listener(replace(event, last=finish is not None))
                    if last:
                        break
                progress = training.round(progress)

    def files(self) -> dict[str, PartFiles]:
        setup, name, seed = self.setup, self.part.method, self.part.seed
        scores = None
        if setup.validates:
            higher, best = setup.measure.higher_is_better, setup.config.keep == "best"
            scores = ValidationScores(higher, setup.config.stop_when, best)
        folder = self.directory.part("methods", name, seed)
        belongs_to, device = setup.problem.belongs_to(seed), setup.config.device
        return {name: PartFiles(folder, belongs_to, scores, device)}

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Records rounds in the files of the training, or why it failed, and the time it took."""
        name, seed, began = self.part.method, self.part.seed, time.perf_counter()
        files, algorithm = self.files()[name], self.setup.algorithms[name]
        try:
            with Recorder(
                self.directory, files, self.setup.config, name, algorithm, seed
            ) as recorder:
                yield recorder
        except TrainingError as error:  # the other methods continue
            self.directory.write_failure(name, seed, str(error), files.warnings)
        else:
            seconds = time.perf_counter() - began
            times = {"seconds": seconds} | self._speed_trial()
            self.directory.write_timing(method=name, seed=seed, **times)

    def evaluate(
        self, engine: Engine, progress: Progress, recorder: Recorder
    ) -> tuple[dict[str, Any], Finish | None]:
        """Further entries of the metrics of a round; of the last one also what finishes it."""
        name = self.part.method
        evaluator = Evaluator.of(self.setup, engine, name)
        entries, final = evaluator.round(progress, recorder)
        if final is None:
            return entries, None

        def finish() -> None:
            evaluator.write_personal_models(name, final, recorder.files.folder)
            recorder.finish(evaluator.with_examples(final), progress, final.shown)

        return entries, finish

    def _speed_trial(self) -> dict[str, float]:
        """The speed-up of a convolutional net's gradients in channels-last, bfloat16 and both,
        where these settings are possible."""
        setup, name, seed = self.setup, self.part.method, self.part.seed
        config, engine = setup.config, setup.engine_names[name]
        usual = config.memory_format == "contiguous" and config.device == "cpu"
        if not usual or engine not in ("direct", "direct_onednn"):
            return {}
        federation = setup.federations[seed]
        plain, used = setup.objectives[seed], setup.engines[seed].get(engine).objective
        w = plain.initial()
        if not has_kernels(plain.module(w)):
            return {}
        rows, size = federation.batch_rows(
            federation.split.seen[0], setup.algorithms[name].batch_size
        )
        batch = Batch(*federation.take(rows[:size]), seed=0)
        tried = {"as trained": used, "channels_last": used.variant(memory_format="channels_last")}
        if config.precision == "float32" and not no_mixed_precision(config, setup.algorithms):
            mixed = plain.variant(precision="bfloat16")
            with suppress(RuntimeError):  # of a module that can't be computed in it
                mixed.grad(w, batch)
                tried["bfloat16"] = mixed
                tried["channels_last_bfloat16"] = mixed.variant(memory_format="channels_last")
        times: dict[str, list[float]] = {setting: [] for setting in tried}
        for _ in range(TRIAL_TURNS):
            for setting, objective in tried.items():
                began = time.process_time()
                objective.grad(w, batch)
                times[setting].append(time.process_time() - began)
        usually = min(times.pop("as trained"))
        return {setting: usually / min(taken) for setting, taken in times.items()}

    def _doubt(self, files: PartFiles, round: int, message: str) -> None:
        files.warn(round, message)
        text = f"{self.part.method}, seed {self.part.seed}: {message}"
        warnings.warn(text, NumericalWarning, stacklevel=2)


class BaselineJob(Job):
    """Evaluates the null baselines with one seed that are not done yet."""

    def __call__(self, listener: Listener, workers: int, stop: Stop) -> None:
        setup, seed, rounds = self.setup, self.part.seed, self.setup.config.rounds
        listener(Event(seed, self.part.method, 0, starts=True))
        files = self.files()
        missing = [name for name, baseline in files.items() if not baseline.is_done(rounds)]
        if missing:
            with open_engines(setup, seed, workers) as get_engine, stop.immediately():
                for name, evaluation in baselines(setup, seed, get_engine, missing):
                    files[name].finish_baseline(rounds, evaluation)

    def files(self) -> dict[str, PartFiles]:
        seed = self.part.seed
        belongs_to = self.setup.problem.belongs_to(seed)
        return {
            name: PartFiles(self.directory.part("baselines", name, seed), belongs_to)
            for name in self.setup.baselines()
        }


@contextmanager
def open_engines(setup: Setup, seed: int, workers: int) -> Iterator[Callable[[EngineName], Engine]]:
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
