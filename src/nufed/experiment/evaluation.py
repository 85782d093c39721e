"""The evaluation of one method and seed on an engine."""

from __future__ import annotations

from collections.abc import Sequence

from nufed.algorithms.protocol import Algorithm, State
from nufed.data import ScoredOn
from nufed.evaluate import ByScale, Evaluation, evaluate_with_choice
from nufed.experiment.setup import Setup
from nufed.server import AgentStates, StatesOf
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
