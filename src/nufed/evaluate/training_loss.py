"""The training loss of a round: how well the model fits the samples that it was just trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nufed.algorithms.protocol import Algorithm, Cost, State
from nufed.data import Federation
from nufed.evaluate.scores import evaluation_context
from nufed.objective import Objective
from nufed.server import AgentStates

PIECE = 256  # samples that go through the model at once


def training_loss(
    algorithm: Algorithm,
    objective: Objective,
    federation: Federation,
    agents: Sequence[int],
    received: State,
    states: AgentStates,
    seed: int,
) -> tuple[float, Cost]:
    """The mean over ``agents`` of f_i(w), and the cost of computing their models.

    f_i is agent i's mean loss on its training part and w the global model, before any fine-tuning;
    where there is none, it is the agent's personal model. It takes one forward pass and, with a
    global model, no gradient. A part is evaluated in pieces, whose mean losses are averaged by
    their number of samples.

    Args:
        algorithm, objective, federation: what is trained, and on which data.
        agents: the round's cohort.
        received: what the server broadcasts after the round.
        states: the agents' states.
        seed: of the training.
    """
    model, losses, cost = algorithm.global_model(objective, received), [], Cost()
    for agent in agents:
        tensors: State = {} if model is None else {"model": model}
        if model is None:
            batches = federation.batches(agent, seed, "evaluate")
            own = evaluation_context(federation, objective, batches, batches.samples)
            personal = algorithm.personal_model(own, received, states.get(agent))
            tensors, cost = personal.tensors, cost + personal.cost
        rows, total = federation.split.train[agent], 0.0
        for start in range(0, len(rows), PIECE):
            inputs, targets = federation.samples.take(rows[start : start + PIECE])
            if model is None:
                outputs = algorithm.predict(objective, tensors, inputs)
            else:
                outputs = objective.predict(model, inputs)
            total += len(targets) * float(objective.loss(outputs, targets))
        losses.append(total / len(rows))
    return math.fsum(losses) / len(losses) if losses else math.nan, cost
