"""The batched engine: several agents of a small model at once, as rows of one stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nufed.algorithm import Algorithm, ClientResult, State
from nufed.data import AgentBatches, Federation
from nufed.evaluate import AgentScores, Measure, agent_scores, score_outputs
from nufed.objective import Batch, Inputs, Objective
from nufed.simulation.engine import work_of


@dataclass(frozen=True)
class BatchedEngine:
    """Chunks of agents, stacked (an :class:`~nufed.simulation.engine.Engine`).

    ``most`` is how many agents a chunk has at most. The algorithm must combine vectors elementwise
    (:class:`nufed.algorithm.Combining`), and the module may not draw random numbers.
    """

    objective: Objective
    federation: Federation
    seed: int
    most: int = 32

    def chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        return even_chunks(self.federation, algorithm.batch_size, agents, self.most)

    def client_updates(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], round: int
    ) -> dict[int, ClientResult]:
        results: dict[int, ClientResult] = {}
        for chunk in self.chunks(algorithm, list(states)):
            with work_of(chunk, f"round {round}"):
                results |= self._update_chunk(
                    algorithm, received, {agent: states[agent] for agent in chunk}, round
                )
        return results

    def _update_chunk(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], round: int
    ) -> dict[int, ClientResult]:
        sources = [self.federation.batches(agent, self.seed, "train", round) for agent in states]
        result = algorithm.client_update(
            self.objective,
            stack([received] * len(states)),
            stack(list(states.values())),
            StackedBatches(sources),
        )
        return {
            agent: ClientResult(_row(result.vectors, row), _row(result.state, row), result.cost)
            for row, agent in enumerate(states)
        }

    def evaluate(
        self,
        algorithm: Algorithm,
        server: State,
        states: Mapping[int, State],
        *,
        steps: int,
        measure: Measure,
    ) -> list[AgentScores]:
        scores: dict[int, AgentScores] = {}
        for chunk in self.chunks(algorithm, list(states)):
            with work_of(chunk, "evaluation"):
                own = {agent: states[agent] for agent in chunk}
                scores |= self._evaluate_chunk(algorithm, server, own, steps, measure)
        return [scores[agent] for agent in states]

    def _evaluate_chunk(
        self,
        algorithm: Algorithm,
        server: State,
        states: Mapping[int, State],
        steps: int,
        measure: Measure,
    ) -> dict[int, AgentScores]:
        sources = [self.federation.batches(agent, self.seed, "evaluate") for agent in states]
        models = list(
            algorithm.personalize(
                self.objective,
                stack([server] * len(states)),
                stack(list(states.values())),
                StackedBatches(sources),
                steps,
            )
        )
        scores = {}
        for row, agent in enumerate(states):
            inputs, targets = self.federation.test(agent)
            outputs = (self.objective.predict(stacked[row], inputs) for stacked in models)
            scored = [score_outputs(self.objective, o, targets, measure) for o in outputs]
            scores[agent] = agent_scores(self.federation, agent, scored)
        return scores


@dataclass(frozen=True)
class StackedBatches:
    """The batches of several agents, stacked (a :class:`nufed.algorithm.BatchSource`)."""

    sources: Sequence[AgentBatches]

    def draw(self, purpose: str, size: int, count: int = 1, step: int = 0) -> list[Batch]:
        drawn = [source.draw(purpose, size, count, step) for source in self.sources]
        return [
            Batch(
                stack_inputs([batch.inputs for batch in together]),
                torch.stack([batch.targets for batch in together]),
                together[0].seed,  # for training mode: nothing random may be drawn
            )
            for together in zip(*drawn, strict=True)
        ]


def even_chunks(
    federation: Federation, batch_size: int, agents: Sequence[int], most: int
) -> list[list[int]]:
    """Agents with batches of one size, in chunks that are as even as possible."""
    groups: dict[int, list[int]] = {}
    for agent in agents:
        groups.setdefault(federation.batch_rows(agent, batch_size)[1], []).append(agent)
    return [
        chunk.tolist()
        for group in groups.values()
        for chunk in np.array_split(group, -(-len(group) // most))
    ]


def stack(states: Sequence[State]) -> State:
    """The states of several agents as one, a row of each vector per agent."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def _row(state: State, row: int) -> State:
    return {name: vectors[row] for name, vectors in state.items()}


def stack_inputs(inputs: Sequence[Inputs]) -> Inputs:
    first = inputs[0]
    if isinstance(first, Tensor):
        return torch.stack(inputs)  # type: ignore[arg-type]
    if isinstance(first, Mapping):
        return {name: torch.stack([one[name] for one in inputs]) for name in first}  # type: ignore[index,call-overload]
    return tuple(torch.stack(column) for column in zip(*inputs, strict=True))
