"""The null baselines: the majority class, the untrained model, and local training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from nufed.algorithms.gmeta import GMeta
from nufed.algorithms.null_baselines import OwnModel
from nufed.algorithms.null_baselines import local_training as training_alone
from nufed.algorithms.protocol import Algorithm, Context, State
from nufed.evaluate import (
    AgentScores,
    Evaluation,
    choose_step_sizes,
    chooses,
    majority_class,
)
from nufed.experiment.evaluation import evaluate
from nufed.experiment.setup import Setup
from nufed.server import Progress
from nufed.simulation import Engine, EngineName
from nufed.simulation.engine_kinds import STACK


def baselines(
    setup: Setup, seed: int, get_engine: Callable[[EngineName], Engine], wanted: Sequence[str]
) -> Iterator[tuple[str, Evaluation]]:
    """Evaluate the null baselines named in ``wanted``."""
    config, steps = setup.config, setup.config.steps_evaluated
    agents, engines = setup.evaluated[seed], setup.engines[seed]
    local, measure = local_training(setup), setup.measure.resampled(len(agents))
    short = local_training(setup, rounds=1)
    own, own_short = OwnModel.like(local), OwnModel.like(short)
    named = config.engine
    engine = get_engine(engines.choose(own, "auto" if named == "gram" else named, own_short))
    if "majority" in wanted:
        scores = [majority_class(engine.federation, a, steps, measure.resamples) for a in agents]
        yield "majority", Evaluation(scores)
    initial = {"model": engine.objective.initial()}
    if "untrained" in wanted:
        choose = chooses(config.eval_lr, True)
        yield "untrained", evaluate(setup, engine, local, Progress(0, initial), choose, True)
    if "local" not in wanted:
        return
    trainer = get_engine(engines.choose(local, named, short))

    def train_and_score(
        scale: float, score: Callable[[dict[int, State]], list[AgentScores]]
    ) -> list[AgentScores]:
        """Agents' scores after local training with ``scale`` times the step size."""
        sized = replace(local, meta_lr=scale * float(local.meta_lr))
        found: dict[int, AgentScores] = {}
        for group in _groups(trainer, sized, agents, setup.workers):
            context = Context(1, len(agents), len(agents))
            results = trainer.agent_updates(sized, initial, {a: {} for a in group}, context)
            scores = score({agent: result.vectors for agent, result in results.items()})
            found |= {own.agent: own for own in scores}
        return [found[agent] for agent in agents if agent in found]

    def validation(models: dict[int, State]) -> list[AgentScores]:
        (scores,) = engine.evaluate_scales(
            own,
            initial,
            {agent: model for agent, model in models.items() if agent in setup.validated(seed)},
            steps=0,
            measure=setup.measure,
            scales=[1.0],
            part="validation",
        )
        return scores

    def final(models: dict[int, State]) -> list[AgentScores]:
        return engine.evaluate(own, initial, models, steps=steps, measure=measure)

    sizes = None
    if config.tune_local:
        sizes = choose_step_sizes(
            lambda scales: [train_and_score(scale, validation) for scale in scales],
            [0],
            measure,
            "best",
        )
    scores = train_and_score(sizes.scale(0) if sizes else 1.0, final)
    yield "local", Evaluation(scores, step_sizes=sizes)


def _groups(
    engine: Engine, algorithm: Algorithm, agents: Sequence[int], workers: int
) -> Iterator[list[int]]:
    """Agents whose local models are in memory together: all, or one per worker if large.

    Groups consist of whole chunks of the engine, so that they change no bits.
    """
    if engine.objective.size <= STACK:  # small models are stacked, and groups would change stacks
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


def local_training(setup: Setup, rounds: int | None = None) -> GMeta:
    """Local training with the settings of the first method, of all rounds by default."""
    first = next(iter(setup.algorithms.values()))
    return training_alone(first, setup.config.rounds if rounds is None else rounds)
