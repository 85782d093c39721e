"""The batched engine: several agents of a small model at once, as rows of one stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nufed.algorithm import Algorithm, ClientResult, State
from nufed.data import AgentBatches, Federation, ScoredOn
from nufed.data.partition import Rows
from nufed.evaluate import AgentScores, Measure, score_agent
from nufed.objective import Batch, Inputs, Objective
from nufed.simulation.engine import EvaluatesScales, work_of


@dataclass(frozen=True)
class BatchedEngine(EvaluatesScales):
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

    def evaluate_scales(
        self,
        algorithm: Algorithm,
        server: State,
        states: Mapping[int, State],
        *,
        steps: int,
        measure: Measure,
        scales: Sequence[float],
        part: ScoredOn,
    ) -> list[list[AgentScores]]:
        federation = self.federation.scoring(part)
        agents = federation.scorable(states)
        scores: list[dict[int, AgentScores]] = [{} for _ in scales]
        for chunk in self.chunks(algorithm, agents):
            own = {agent: states[agent] for agent in chunk}
            for found, scale in zip(scores, scales, strict=True):
                with work_of(chunk, "evaluation"):
                    found |= self._evaluate_chunk(
                        algorithm, federation, server, own, steps, measure, scale
                    )
        return [[found[agent] for agent in agents] for found in scores]

    def _evaluate_chunk(
        self,
        algorithm: Algorithm,
        federation: Federation,
        server: State,
        states: Mapping[int, State],
        steps: int,
        measure: Measure,
        scale: float,
    ) -> dict[int, AgentScores]:
        sources = [federation.batches(agent, self.seed, "evaluate") for agent in states]
        models = list(
            algorithm.personalize(
                self.objective,
                stack([server] * len(states)),
                stack(list(states.values())),
                StackedBatches(sources),
                steps,
                scale,
            )
        )
        rows = [federation.scored_rows(agent) for agent in states]
        outputs: list[list[Tensor]]
        if len({len(own) for own in rows}) == 1:
            inputs, _ = take_stacked(federation, rows)
            outputs = [list(self.objective.predict(w, inputs)) for w in models]
        else:
            tests = [federation.scored(agent)[0] for agent in states]
            outputs = [
                [self.objective.predict(own, test) for own, test in zip(w, tests, strict=True)]
                for w in models
            ]
        scores = {}
        for row, agent in enumerate(states):
            own = (each[row] for each in outputs)
            scores[agent] = score_agent(self.objective, federation, agent, own, measure)
        return scores


@dataclass(frozen=True)
class StackedBatches:
    """The batches of several agents, stacked (a :class:`nufed.algorithm.BatchSource`)."""

    sources: Sequence[AgentBatches]

    def draw(self, purpose: str, size: int, count: int = 1, step: int = 0) -> list[Batch]:
        federation = self.sources[0].federation
        picked = [source.pick(purpose, size, count, step) for source in self.sources]
        batches = []
        for together in zip(*picked, strict=True):
            rows = [
                federation.split.train[source.agent][own.places]
                for source, own in zip(self.sources, together, strict=True)
            ]
            inputs, targets = take_stacked(federation, rows)
            # a seed for training mode: nothing random may be drawn
            batches.append(Batch(inputs, targets, together[0].seed))
        return batches


def take_stacked(federation: Federation, rows: Sequence[Rows]) -> tuple[Inputs, Tensor]:
    """The samples of several agents, each with as many rows, stacked."""
    inputs, targets = federation.samples.take(np.concatenate(rows))

    def stacked(x: Tensor) -> Tensor:
        return x.view(len(rows), len(rows[0]), *x.shape[1:])

    if isinstance(inputs, Tensor):
        return stacked(inputs), stacked(targets)
    if isinstance(inputs, Mapping):
        return {name: stacked(x) for name, x in inputs.items()}, stacked(targets)
    return tuple(map(stacked, inputs)), stacked(targets)


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
