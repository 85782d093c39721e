"""The work of training, predicted from a few measured agent updates and counted in gradients.

A Hessian-vector product counts as two gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nufed.algorithms.protocol import AgentResult, Algorithm, Context
from nufed.errors import NufedError
from nufed.experiment.setup import Setup
from nufed.experiment.tuning.trial_jobs import setup_of
from nufed.runs.tuning_record import HVP_WORK
from nufed.server import cohort_size, to_send
from nufed.simulation import DirectEngine


class Predictor:
    """Predicts the work of a round of each method, for any settings.

    It is measured at the agent with the median number of samples, in the first, the middle and the
    last round (some methods have phases), once for all settings that differ in real numbers only.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._known: dict[tuple[Any, ...], float] = {}

    def __call__(self, method: str, settings: Mapping[str, Any]) -> float:
        """The predicted work of a round."""
        whole = sorted((k, v) for k, v in settings.items() if not isinstance(v, float))
        key = (method, *whole)
        if key not in self._known:
            try:
                algorithm = setup_of(self._setup, method, settings).algorithms[method]
                self._known[key] = self._measured(algorithm)
            except NufedError:  # the trial fails for the same reason, and costs nothing
                return 0.0
        return self._known[key]

    def _measured(self, algorithm: Algorithm) -> float:
        config = self._setup.config
        seen = len(self._setup.federations[config.seeds[0]].split.seen)
        rounds = sorted({1, (config.rounds + 1) // 2, config.rounds})
        costs = [agent_update(self._setup, algorithm, k).cost for k in rounds]
        work = sum(cost.gradients + HVP_WORK * cost.hvps for cost in costs) / len(rounds)
        return cohort_size(seen, config.participation) * work


def agent_update(setup: Setup, algorithm: Algorithm, round: int) -> AgentResult:
    """What the agent with the median number of samples does in a round, from the initial model."""
    config, seed = setup.config, setup.config.seeds[0]
    objective, federation = setup.objectives[seed], setup.federations[seed]
    split = federation.split
    by_samples = sorted(split.seen, key=lambda agent: (len(split.train[agent]), agent))
    agent = by_samples[len(by_samples) // 2]
    received = to_send(algorithm, algorithm.initial_server(objective, objective.initial()))
    state = algorithm.agent_init(objective, received)
    context = Context(round, len(split.seen), cohort_size(len(split.seen), config.participation))
    engine = DirectEngine(objective, federation, seed)
    return engine.agent_updates(algorithm, received, {agent: state}, context)[agent]


def matters(setup: Setup, method: str, key: str, value: Any) -> bool:
    """Whether a setting has an effect beyond the step size that evaluation chooses.

    It has none if it is the step size of fine-tuning and an agent's update has the same bits with
    another value, in the last round (earlier phases may not use it).
    """
    config, before = setup.config, setup.algorithms[method]
    if config.eval_lr == "as_trained":
        return True
    after = setup_of(setup, method, {key: value}).algorithms[method]
    if after.initial_rate == before.initial_rate:
        return True
    a, b = (agent_update(setup, algorithm, config.rounds) for algorithm in (before, after))
    pairs = (
        (x, y) for s, t in ((a.vectors, b.vectors), (a.state, b.state)) for x, y in _both(s, t)
    )
    return not all(torch.equal(x, y) for x, y in pairs)


def _both(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(a[name], b[name]) for name in a]
