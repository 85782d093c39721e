"""The independent parts of a run: each method, and the null baselines, for each seed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torch import Tensor

from nufed.algorithm import Algorithm, BatchSource, Combining, State
from nufed.algorithms import GMeta
from nufed.data import ScoredOn
from nufed.errors import NumericalWarning, TrainingError
from nufed.evaluate import (
    AgentScores,
    ByScale,
    Evaluation,
    choose_step_sizes,
    chooses,
    evaluate_with_choice,
    majority_class,
)
from nufed.experiment.setup import Setup
from nufed.experiment.stopping import Stop
from nufed.metagrad import FirstOrder
from nufed.objective import AnyObjective
from nufed.runs import RunDirectory
from nufed.runs.lines import evaluation_line, round_line
from nufed.runs.part import PartFiles
from nufed.simulation import Engine, EngineName, Progress, WorkerEngine, train
from nufed.simulation.choose import STACK

BASELINES = "null baselines"


@dataclass(frozen=True)
class Event:
    """What a progress display needs: where the run is, and the last score measured there."""

    seed: int
    method: str
    round: int
    score: float | None


Listener: TypeAlias = Callable[[Event], None]


@dataclass(frozen=True)
class Part:
    """One method (or the null baselines) with one seed, and roughly how much work it is."""

    seed: int
    method: str
    work: float

    def __str__(self) -> str:
        return f"{self.method} with seed {self.seed}"


def parts_of(setup: Setup) -> list[Part]:
    """The parts of a run, seed by seed."""
    config, agents = setup.config, len(setup.federations[setup.config.seeds[0]].split.agents)
    evaluated = len(setup.evaluated[config.seeds[0]])
    works: dict[str, float] = {}
    if config.baselines:
        local = "local" in config.baselines
        works[BASELINES] = float(evaluated * _alone(setup).local_steps * local)
    for name, algorithm in setup.algorithms.items():
        draws = algorithm.update_draws() if isinstance(algorithm, Combining) else []
        batches = sum(draw.number for draw in draws) or 1
        works[name] = config.rounds * config.participation * agents * batches
    return [Part(seed, name, work) for seed in config.seeds for name, work in works.items()]


def run_part(
    setup: Setup, part: Part, directory: RunDirectory, listener: Listener, workers: int, stop: Stop
) -> None:
    """Train and evaluate one part, with so many processes, and write down what came out.

    What is done already is left alone; what was begun goes on from its last checkpoint.
    """
    listener(Event(part.seed, part.method, 0, None))
    with ExitStack() as stack:

        def spread(name: EngineName) -> Engine:
            engine = setup.engines[part.seed].get(name)
            return stack.enter_context(WorkerEngine(engine, workers)) if workers > 1 else engine

        if part.method == BASELINES:
            with stop.at_once():
                _run_baselines(setup, part.seed, spread, directory)
            return
        files = _files(setup, directory, "methods", part.method, part.seed)
        if files.is_done(setup.config.rounds):
            return
        engine, algorithm = spread(setup.engine_names[part.method]), setup.algorithms[part.method]
        try:
            _run_method(setup, engine, part.method, algorithm, directory, listener, files, stop)
        except TrainingError as error:  # the other methods go on
            directory.write_failure(part.method, part.seed, str(error), files.warnings)


def _run_method(
    setup: Setup,
    engine: Engine,
    name: str,
    algorithm: Algorithm,
    directory: RunDirectory,
    listener: Listener,
    files: PartFiles,
    stop: Stop,
) -> None:
    config, seed = setup.config, engine.seed
    began, score = time.perf_counter(), None
    saved = files.begin(config.rounds, config.eval_every)
    start = Progress(saved.round, saved.server, saved.clients) if saved else None
    saved_round = saved.round if saved else None

    def doubt(round: int, message: str) -> None:
        files.warnings.append({"round": round, "message": message})
        warnings.warn(f"{name}, seed {seed}: {message}", NumericalWarning, stacklevel=2)

    training = train(
        algorithm,
        engine,
        engine.objective.initial(),
        rounds=config.rounds,
        participation=config.participation,
        start=start,
        rules=setup.rules,
        faults=setup.faults,
        label=f"{name}, seed {seed}",
        on_doubt=doubt,
    )
    with closing(files):
        if saved:
            like = algorithm.server_init(engine.objective, engine.objective.initial())
            saved.check_fits(like, files.folder)
            del like
        del saved, start  # their vectors are needed for the first round only
        for progress in training:
            saved_before, last = progress.round == saved_round, progress.round == config.rounds
            if saved_before and not last:
                continue
            line = round_line(algorithm, progress)
            if progress.round % config.eval_every == 0 or last:
                states = progress.client_states(algorithm, setup.evaluated[seed])
                choose = chooses(config.eval_lr, last)
                evaluation = _evaluate(setup, engine, algorithm, progress.server, states, choose)
                line |= evaluation_line(evaluation, config.steps_evaluated, setup.measure)
                score = line["evaluation"]["seen"]["score"][config.steps_of(name)[0]]
            if not saved_before:
                files.add(line)
                if _due(config.save_every, progress.round):
                    directory.write_model(name, seed, progress.server, progress.round)
                if last or stop() or _due(config.checkpoint_every, progress.round):
                    files.checkpoint(progress.round, progress.server, progress.clients)
            if last:  # also of a run that was killed between its last checkpoint and here
                files.finish(config.rounds, evaluation, progress.server)
            listener(Event(seed, name, progress.round, score))
            if stop() and not last:
                break
    directory.write_timing(method=name, seed=seed, seconds=time.perf_counter() - began)


def _due(every: int, round: int) -> bool:
    return every > 0 and round > 0 and round % every == 0


def _files(setup: Setup, directory: RunDirectory, kind: str, name: str, seed: int) -> PartFiles:
    return PartFiles(directory.part(kind, name, seed), setup.belongs_to(seed))


def _run_baselines(
    setup: Setup, seed: int, spread: Callable[[EngineName], Engine], directory: RunDirectory
) -> None:
    rounds = setup.config.rounds
    files = {name: _files(setup, directory, "baselines", name, seed) for name in setup.baselines()}
    missing = [name for name, own in files.items() if not own.is_done(rounds)]
    for name, evaluation in _baselines(setup, seed, spread, missing) if missing else ():
        files[name].finish_baseline(rounds, evaluation)


def _evaluate(
    setup: Setup,
    engine: Engine,
    algorithm: Algorithm,
    server: State,
    states: Mapping[int, State],
    choose: bool,
) -> Evaluation:
    """Scores as trained and, if ``choose`` and where it can be done, with chosen step sizes."""
    steps, measure = setup.config.steps_evaluated, setup.measure

    def on(part: ScoredOn, states: Mapping[int, State]) -> ByScale:
        return lambda scales: engine.evaluate_scales(
            algorithm, server, states, steps=steps, measure=measure, scales=scales, part=part
        )

    seen = {a: s for a, s in states.items() if a in setup.validated(engine.seed)}
    validate = on("validation", seen) if choose and seen else None
    return evaluate_with_choice(on(setup.config.eval_on, states), validate, steps, measure)


def _baselines(
    setup: Setup, seed: int, spread: Callable[[EngineName], Engine], wanted: Sequence[str]
) -> Iterator[tuple[str, Evaluation]]:
    """The null baselines that are wanted."""
    config, steps = setup.config, setup.config.steps_evaluated
    agents, engines = setup.evaluated[seed], setup.engines[seed]
    alone, measure = _alone(setup), setup.measure
    own = _OwnModel(**vars(alone))
    named = config.engine
    engine = spread(engines.choose(own, "auto" if named == "gram" else named))
    if "majority" in wanted:
        scores = [majority_class(engine.federation, a, steps) for a in agents]
        yield "majority", Evaluation(scores)
    initial = {"model": engine.objective.initial()}
    if "untrained" in wanted:
        untrained: dict[int, State] = dict.fromkeys(agents, initial)
        yield (
            "untrained",
            _evaluate(setup, engine, own, initial, untrained, chooses(config.eval_lr, True)),
        )
    if "local" not in wanted:
        return
    trainer = spread(engines.choose(alone, named))

    def trained_alone(
        scale: float, score: Callable[[dict[int, State]], list[AgentScores]]
    ) -> list[AgentScores]:
        """Agents' scores after training alone with ``scale`` times the step size."""
        sized = replace(alone, meta_lr=scale * float(alone.meta_lr))
        found: dict[int, AgentScores] = {}
        for group in _groups(trainer, sized, agents, setup.workers):
            results = trainer.client_updates(sized, initial, {a: {} for a in group}, round=1)
            scores = score({agent: result.vectors for agent, result in results.items()})
            found |= {own.agent: own for own in scores}
        return [found[agent] for agent in agents if agent in found]

    def validation(models: dict[int, State]) -> list[AgentScores]:
        (scores,) = engine.evaluate_scales(
            own,
            initial,
            {agent: model for agent, model in models.items() if agent in setup.validated(seed)},
            steps=0,
            measure=measure,
            scales=[1.0],
            part="validation",
        )
        return scores

    def final(models: dict[int, State]) -> list[AgentScores]:
        return engine.evaluate(own, initial, models, steps=steps, measure=measure)

    sizes = None
    if config.tune_local:
        sizes = choose_step_sizes(
            lambda scales: [trained_alone(scale, validation) for scale in scales], [0], measure
        )
    scores = trained_alone(sizes.scale(0) if sizes else 1.0, final)
    yield "local", Evaluation(scores, step_sizes=sizes)


def _groups(
    engine: Engine, algorithm: Algorithm, agents: Sequence[int], workers: int
) -> Iterator[list[int]]:
    """Agents whose own models are held at a time: all, or of a large model one per worker.

    Groups consist of whole chunks of the engine, so that no bit depends on them.
    """
    if engine.objective.size <= STACK:  # these are run in stacks, which groups would change
        yield list(agents)
        return
    group: list[int] = []
    for chunk in engine.chunks(algorithm, agents):
        group += chunk
        if len(group) >= workers:
            yield group
            group = []
    if group:
        yield group


class _OwnModel(GMeta):
    """For agents whose state is a model of their own."""

    @property
    def combines(self) -> Literal["elementwise", "linearly"]:
        return "elementwise"

    def personalize(
        self,
        objective: AnyObjective,
        server: State,
        state: State,
        batches: BatchSource,
        steps: int,
        scale: float = 1.0,
    ) -> Iterator[Tensor]:
        return super().personalize(objective, state, {}, batches, steps, scale)


def _alone(setup: Setup) -> GMeta:
    """Local training for all rounds, with the settings of the first method."""
    first = next(iter(setup.algorithms.values()))
    settings = first if isinstance(first, GMeta) else setup.config.method
    return GMeta(
        adapt_steps=0,
        adapt_lr=settings.adapt_lr,
        meta_lr=settings.meta_lr,
        batch_size=settings.batch_size,
        local_steps=settings.local_steps * setup.config.rounds,
        curvature=FirstOrder(),
    )
