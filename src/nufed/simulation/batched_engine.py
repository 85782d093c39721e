"""The batched engine: several agents of a small model at once, stacked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    Algorithm,
    Context,
    Pool,
    State,
    draws_halves,
)
from nufed.data import AgentBatches, Federation
from nufed.data.partition import Rows
from nufed.data.samples import mapped
from nufed.evaluate import AgentScores, Scoring, evaluation_context
from nufed.evaluate.scores import Apply, outputs_of, score_stack
from nufed.objective import Batch, Inputs, Objective
from nufed.server import Downlink
from nufed.simulation.engine import Engine, States


@dataclass(frozen=True)
class BatchedEngine(Engine):
    """Chunks of agents, stacked.

    ``most`` is the maximum number of agents in a chunk. The algorithm must combine vectors
    elementwise (``Algorithm.combines``), and the module must not draw random numbers.
    """

    objective: Objective
    federation: Federation
    seed: int
    most: int = 32

    def __post_init__(self) -> None:
        vars(self)["federation"] = self.federation.on(self.objective.initial().device)

    def chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        return even_chunks(self.federation, algorithm, agents, self.most)

    def _update_chunk(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], context: Context
    ) -> dict[int, AgentResult]:
        draws = algorithm.update_draws()
        by_agent = (self.federation.batches(a, self.seed, "train", context.round) for a in states)
        batches = StackedBatches([each.ahead(draws) for each in by_agent])
        result = algorithm.agent_update(
            AgentContext.of(context, self.objective, batches, batches.samples),
            stack_received(received, states),
            stack(list(states.values())),
        )
        return {
            agent: AgentResult(_row(result.vectors, row), _row(result.state, row), result.cost)
            for row, agent in enumerate(states)
        }

    def _evaluate_chunk(
        self,
        algorithm: Algorithm,
        federation: Federation,
        received: State,
        states: States,
        scoring: Scoring,
    ) -> list[dict[int, AgentScores]]:
        scores: list[dict[int, AgentScores]] = [{} for _ in scoring.scales]
        for group in _with_and_without(states):
            scored = self._evaluate_group(algorithm, federation, received, group, scoring)
            for by_agent, of_group in zip(scores, scored, strict=True):
                by_agent |= of_group
        return scores

    def _evaluate_group(
        self,
        algorithm: Algorithm,
        federation: Federation,
        received: State,
        states: States,
        scoring: Scoring,
    ) -> list[dict[int, AgentScores]]:
        """The scores by scale, of agents that all have a state or all have none."""
        draws = algorithm.personal_draws(scoring.steps)  # once for all scales
        by_agent = (federation.batches(agent, self.seed, "evaluate") for agent in states)
        batches = StackedBatches([each.ahead(draws) for each in by_agent])
        given = [state for state in states.values() if state is not None]
        outputs = outputs_of(
            algorithm,
            evaluation_context(federation, self.objective, batches, batches.samples),
            stack_received(received, states),
            stack(given) if given else None,
            self._apply(federation, list(states)),
            scoring.steps,
            scoring.scales,
        )
        return score_stack(self.objective, federation, list(states), outputs, scoring.measure)

    def _apply(self, federation: Federation, agents: list[int]) -> Apply:
        """Applies a stacked prediction to the samples that each agent is scored on."""
        rows = [federation.scored_rows(agent) for agent in agents]
        if len({len(agent_rows) for agent_rows in rows}) == 1:
            inputs, _ = take_stacked(federation, rows)
            return lambda predict, tensors: predict(tensors, inputs)
        tests = [federation.scored(agent)[0] for agent in agents]
        return lambda predict, tensors: [
            predict(_row(tensors, row), test) for row, test in enumerate(tests)
        ]


class OfAStack:
    """What a :class:`~nufed.algorithms.protocol.BatchSource` of a stack of agents does not have."""

    def stream(self, purpose: str, step: int = 0) -> np.random.Generator:
        raise TypeError("agents of a stack have random streams of their own")

    def epoch(self, purpose: str, size: int, index: int = 0, share: float = 1.0) -> list[Batch]:
        raise TypeError("agents of a stack have epochs of different lengths")

    def take(self, places: Rows, seed: int | None = None) -> Batch:
        raise TypeError("agents of a stack have training parts of different sizes")

    def whole(self) -> Batch:
        raise TypeError("agents of a stack have training parts of different sizes")

    def targets(self) -> Tensor:
        raise TypeError("agents of a stack have training parts of different sizes")


@dataclass(frozen=True)
class StackedBatches(OfAStack):
    """The batches of several agents, stacked (a :class:`nufed.algorithms.protocol.BatchSource`)."""

    sources: Sequence[AgentBatches]

    @property
    def agent(self) -> Tensor:
        """The number of each agent, as a column."""
        return torch.tensor([[source.agent] for source in self.sources])

    @property
    def samples(self) -> Tensor:
        """The number of training samples of each agent, as a column."""
        return torch.tensor([[source.samples] for source in self.sources])

    def draw(
        self, purpose: str, size: int, number: int = 1, step: int = 0, pool: Pool = "all"
    ) -> list[Batch]:
        federation = self.sources[0].federation
        if self.sources[0].augment is not None:  # changes the batches of one agent after another
            drawn = [source.draw(purpose, size, number, step, pool) for source in self.sources]
            return [_stacked(together) for together in zip(*drawn, strict=True)]
        picked = [source.pick(purpose, size, number, step, pool) for source in self.sources]
        batches = []
        for together in zip(*picked, strict=True):
            inputs, targets = take_stacked(federation, [source.taken for source in together])
            # the seed only selects training mode: the module draws nothing
            batches.append(Batch(inputs, targets, together[0].seed))
        return batches


def _stacked(batches: Sequence[Batch]) -> Batch:
    """The batches of several agents, stacked; the seed only selects training mode."""
    first = batches[0].inputs
    if isinstance(first, Tensor):
        inputs: Inputs = torch.stack([cast(Tensor, each.inputs) for each in batches])
    elif isinstance(first, Mapping):
        given = [cast(Mapping[str, Tensor], each.inputs) for each in batches]
        inputs = {name: torch.stack([each[name] for each in given]) for name in first}
    else:
        inputs = tuple(map(torch.stack, zip(*(each.inputs for each in batches), strict=True)))
    return Batch(inputs, torch.stack([each.targets for each in batches]), batches[0].seed)


def take_stacked(federation: Federation, rows: Sequence[Rows | Tensor]) -> tuple[Inputs, Tensor]:
    """The samples of several agents with equally many rows each, stacked."""
    index = [each for each in rows if isinstance(each, Tensor)]  # all of them, or none
    inputs, targets = federation.take(torch.cat(index) if index else np.concatenate(rows))

    def stacked(x: Tensor) -> Tensor:
        return x.view(len(rows), len(rows[0]), *x.shape[1:])

    return mapped(stacked, inputs), stacked(targets)


def even_chunks(
    federation: Federation, algorithm: Algorithm, agents: Sequence[int], most: int
) -> list[list[int]]:
    """Chunks of agents with equally large batches, as even as possible."""
    groups: dict[tuple[int, int], list[int]] = {}
    for agent in agents:
        rows, size = federation.batch_rows(agent, algorithm.batch_size)
        half = min(size, len(rows) // 2) if draws_halves(algorithm) else 0
        groups.setdefault((size, half), []).append(agent)
    return [
        chunk.tolist()
        for group in groups.values()
        for chunk in np.array_split(group, -(-len(group) // most))
    ]


def _with_and_without(states: States) -> list[States]:
    """The agents with a state and the newcomers, where there are any."""
    groups: list[States] = [
        {agent: state for agent, state in states.items() if (state is None) == newcomers}
        for newcomers in (False, True)
    ]
    return [group for group in groups if group]


def stack(states: Sequence[State]) -> State:
    """The states of several agents, stacked: one row per agent."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def stack_received(received: State, agents: Iterable[int]) -> State:
    """What these agents receive, stacked."""
    down = Downlink.of(received)
    return stack([down.to(agent) for agent in agents])


def _row(state: State, row: int) -> State:
    return {name: vectors[row] for name, vectors in state.items()}
