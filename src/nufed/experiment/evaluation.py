"""The evaluation of one method and seed on an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nufed.algorithms.protocol import Algorithm, State
from nufed.data import ScoredOn
from nufed.evaluate import ByScale, Evaluation, evaluate_with_choice, training_loss
from nufed.experiment.setup import Setup
from nufed.server import AgentStates, Progress, StatesOf, choose_cohort, to_send
from nufed.simulation import Engine


def evaluate(
    setup: Setup,
    engine: Engine,
    algorithm: Algorithm,
    received: State,
    states: AgentStates,
    choose: bool,
) -> Evaluation:
    """Scores of the evaluated agents as trained and, if ``choose`` and they have validation
    samples, with step sizes chosen on these."""
    steps, measure = setup.config.steps_evaluated, setup.measure

    def on(part: ScoredOn, agents: Sequence[int]) -> ByScale:
        own = StatesOf(agents, states)
        return lambda scales: engine.evaluate_scales(
            algorithm, received, own, steps=steps, measure=measure, scales=scales, part=part
        )

    agents = setup.evaluated[engine.seed]
    seen = [agent for agent in agents if agent in setup.validated(engine.seed)]
    validate = on("validation", seen) if choose and seen else None
    return evaluate_with_choice(on(setup.config.eval_on, agents), validate, steps, measure)


def training_entries(
    setup: Setup,
    engine: Engine,
    algorithm: Algorithm,
    progress: Progress,
    line: Mapping[str, Any],
) -> dict[str, Any]:
    """The entries of the training loss in a round's line; its cost is added to the evaluation's.

    It is that of the round's cohort; before training, of the first one.
    """
    seen, rate, seed = engine.federation.split.seen, setup.config.participation, engine.seed
    loss, cost = training_loss(
        algorithm,
        engine.objective,
        engine.federation,
        progress.cohort or choose_cohort(seen, rate, seed, 1),
        to_send(algorithm, progress.server),
        progress.states,
        seed,
    )
    return {
        "training_loss": loss,
        "evaluation_gradients": line["evaluation_gradients"] + cost.gradients,
        "evaluation_hvps": line["evaluation_hvps"] + cost.hvps,
    }
