"""The Gram engine: models with a linear first layer, trained in Gram space."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    Algorithm,
    Context,
    Draw,
    Pool,
    State,
)
from nufed.data import AgentBatches, Federation, ScoredOn
from nufed.data.partition import Rows
from nufed.evaluate import AgentScores, Scoring, evaluation_context
from nufed.evaluate.scores import Predict, outputs_of, score_stack
from nufed.objective import Batch, Objective
from nufed.objective.fast.gram_space import FirstLayer, GramObjective, GramVector, distinct
from nufed.simulation.batched_engine import BatchedEngine, OfAStack, even_chunks
from nufed.simulation.engine import Engine, States
from nufed.simulation.worker_pool import shared_zeros


class GramEngine(Engine):
    """Chunks of agents in Gram space.

    The algorithm must combine vectors linearly (``Algorithm.combines``) and use no vector but the
    model. The Gram matrices K of the agents' training parts are computed on first use and cached in
    memory shared with all processes forked after the engine was made.

    Args:
        objective, federation, seed: as of every engine.
        layer: the model's first layer.
        most: the maximum number of agents in a chunk.
        stacked: evaluates in its place, which is faster for small models.
    """

    def __init__(
        self,
        objective: Objective,
        federation: Federation,
        seed: int,
        layer: FirstLayer,
        most: int = 5,
        stacked: BatchedEngine | None = None,
    ) -> None:
        self.objective, self.federation, self.seed = objective, federation, seed
        self._stacked = stacked
        self._layer, self._most = layer, most
        largest = federation.split.most_rows
        agents = len(federation.split.agents)
        self._grams = shared_zeros((agents, largest, largest), objective.dtype)
        self._gram_computed = shared_zeros((agents,), torch.uint8)
        self._test_grams: dict[tuple[int, tuple[Draw, ...], ScoredOn], Tensor] = {}
        self._table = torch.empty(0, layer.inputs, dtype=objective.dtype)
        self._touched = torch.empty(largest, layer.inputs, dtype=objective.dtype)

    def chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        return even_chunks(self.federation, algorithm, agents, self._most)

    def scored_chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        return (self._stacked or self).chunks(algorithm, agents)

    def _update_chunk(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], context: Context
    ) -> dict[int, AgentResult]:
        model, chunk = received["model"], list(states)
        sources = [self.federation.batches(a, self.seed, "train", context.round) for a in chunk]
        batches = IndexedBatches.make(sources, algorithm.update_draws())
        space = self._training_space(model, chunk, batches.used)
        at_agent = AgentContext.of(context, space.objective, batches, batches.samples)
        result = algorithm.agent_update(at_agent, space.start, {})
        inputs = space.inputs
        del space, at_agent  # frees the start of a large model
        w = cast(GramVector, result.vectors["model"])
        return {
            agent: AgentResult(
                {"model": self._vector(model, w, row, batches.used[row], inputs[row])},
                {},
                result.cost,
            )
            for row, agent in enumerate(chunk)
        }

    def _evaluate_chunk(
        self,
        algorithm: Algorithm,
        federation: Federation,
        received: State,
        states: States,
        scoring: Scoring,
    ) -> list[dict[int, AgentScores]]:
        if self._stacked is not None:
            return self._stacked._evaluate_chunk(algorithm, federation, received, states, scoring)
        chunk, draws = list(states), tuple(algorithm.personal_draws(scoring.steps))
        sources = [federation.batches(agent, self.seed, "evaluate") for agent in chunk]
        batches = IndexedBatches.make(sources, draws, among_used=True)
        space = self._test_space(federation, received["model"], chunk, batches.used, draws)
        trained, tested = max(map(len, batches.used)), len(space.objective.start[0])
        places = torch.arange(trained, tested).expand(len(chunk), -1)
        outputs = outputs_of(
            algorithm,
            evaluation_context(federation, space.objective, batches, batches.samples),
            space.start,
            None,
            partial(_on_places, places=places),
            scoring.steps,
            scoring.scales,
        )
        return score_stack(self.objective, federation, chunk, outputs, scoring.measure)

    def _vector(self, model: Tensor, w: GramVector, row: int, used: Rows, inputs: Tensor) -> Tensor:
        """The flat vector of the agent in this row, whose used samples are ``inputs``."""
        scale, places, rows, others = w.of(row)
        if len(places) > len(used):  # rows of samples that another agent of the chunk used
            mine = np.isin(places, used)
            places, rows = places[mine], rows[torch.from_numpy(mine)]
        touched = inputs[: len(places)]
        if not np.array_equal(used[: len(places)], places):
            order = np.argsort(used)
            index = torch.from_numpy(order[np.searchsorted(used, places, sorter=order)])
            touched = torch.index_select(inputs, 0, index, out=self._touched[: len(places)])
        return self._layer.vector(model, scale, rows, touched, others)

    def _training_space(self, model: Tensor, chunk: list[int], used: list[Rows]) -> _Space:
        """The Gram space around a model; places are positions in the training part."""
        self._make_grams(chunk)
        train = self.federation.split.train
        rows = [train[agent][agent_rows] for agent, agent_rows in zip(chunk, used, strict=True)]
        outputs = model.new_empty(len(chunk), self._grams.shape[1], self._layer.outputs)
        inputs = []
        for row, x in enumerate(self._inputs(rows)):
            place = torch.from_numpy(used[row])
            outputs[row].index_copy_(0, place, self._layer.apply(model, x))
            inputs.append(x)
        return self._space(model, self._grams, torch.tensor(chunk), outputs, inputs)

    def _test_space(
        self,
        federation: Federation,
        model: Tensor,
        chunk: list[int],
        used: list[Rows],
        draws: tuple[Draw, ...],
    ) -> _Space:
        """The Gram space of an evaluation; places count training samples, then scored ones."""
        split = federation.split
        both = [
            (split.train[agent][agent_rows], federation.scored_rows(agent))
            for agent, agent_rows in zip(chunk, used, strict=True)
        ]
        inputs = self._inputs([np.concatenate(pair) for pair in both])
        trained, tested = (max(map(len, column)) for column in zip(*both, strict=True))
        gram = model.new_zeros(len(chunk), trained + tested, trained)
        outputs = model.new_zeros(len(chunk), trained + tested, self._layer.outputs)
        for row, (agent, x) in enumerate(zip(chunk, inputs, strict=True)):
            n, m = map(len, both[row])
            values = self._layer.apply(model, x)
            key = agent, draws, federation.scored_on
            if key not in self._test_grams:  # cached: the same in every round
                self._test_grams[key] = self._layer.gram(x, x[:n])
            products = self._test_grams[key]
            for table, block in ((outputs[row], values), (gram[row, :, :n], products)):
                table[:n] = block[:n]
                table[trained : trained + m] = block[n:]
        return self._space(model, gram, torch.arange(len(chunk)), outputs, [])

    def _space(
        self, model: Tensor, gram: Tensor, tables: Tensor, outputs: Tensor, inputs: list[Tensor]
    ) -> _Space:
        norm = self._layer.norm(model)
        objective = GramObjective(self.objective, self._layer, gram, tables, outputs, norm)
        start = cast(Tensor, objective.initial(self._layer.others(model)))
        return _Space(objective, {"model": start}, inputs)

    def _inputs(self, rows: list[Rows]) -> Iterator[Tensor]:
        """The samples of one agent after another, in a buffer that the next call reuses.

        One after another, so that the first use of them hits the CPU cache.
        """
        sizes = [len(agent_rows) for agent_rows in rows]
        if sum(sizes) > len(self._table):
            self._table = self._table.new_empty(sum(sizes), self._layer.inputs)
        for table, agent_rows in zip(
            torch.split(self._table[: sum(sizes)], sizes), rows, strict=True
        ):
            self.federation.samples.fill(table, agent_rows)
            yield table

    def _make_grams(self, chunk: list[int]) -> None:
        """Compute the matrices K that are not cached yet."""
        for agent in chunk:
            rows = self.federation.split.train[agent]
            if not self._gram_computed[agent]:
                (inputs,) = self._inputs([rows])
                self._layer.fill_gram(self._grams[agent], inputs)
                self._gram_computed[agent] = 1


def _on_places(predict: Predict, tensors: State, *, places: Tensor) -> Tensor:
    return predict(tensors, places)


class _Space(NamedTuple):
    objective: Any  # a GramObjective; algorithms use its vectors in place of tensors
    start: State
    inputs: list[Tensor]


@dataclass(frozen=True)
class IndexedBatches(OfAStack):
    """The batches of several agents as indices into their training parts (a BatchSource).

    ``used`` holds each agent's distinct indices: sorted those that a result can depend on linearly,
    then those of fine-tuning alone, so that the former are one block of samples. With
    ``among_used``, batches hold indices into that list, which is sorted, instead.
    """

    used: list[Rows]
    batches: dict[tuple[str, int], list[Batch]]
    samples: Tensor
    agent: Tensor

    @classmethod
    def make(
        cls, sources: Sequence[AgentBatches], draws: Iterable[Draw], among_used: bool = False
    ) -> IndexedBatches:
        draws = [draw for draw in draws if draw.number]
        samples = torch.tensor([[source.samples] for source in sources])
        agent = torch.tensor([[source.agent] for source in sources])
        if not draws:  # evaluation without fine-tuning
            return cls([np.empty(0, dtype=np.int64) for _ in sources], {}, samples, agent)
        tunes = np.repeat([d.purpose == "adapt" for d in draws], [d.number for d in draws])
        picked = [[p for draw in draws for p in source.pick(*draw)] for source in sources]
        used, places, targets = [], [], []
        for source, taken in zip(sources, picked, strict=True):
            stacked = np.stack([p.places for p in taken])
            if among_used or tunes.all():
                used.append(distinct(stacked))
            else:
                first = distinct(stacked[~tunes])
                used.append(np.concatenate([first, distinct(stacked[tunes], but=first)]))
            places.append(np.searchsorted(used[-1], stacked) if among_used else stacked)
            rows = np.stack([p.rows for p in taken])
            targets.append(source.federation.samples.targets[rows])
        stacks = zip(
            torch.from_numpy(np.stack(places, axis=1)),
            torch.stack(targets, dim=1),
            [p.seed for p in picked[0]],  # only selects training mode: the module draws nothing
            strict=True,
        )
        every = (Batch(*each) for each in stacks)
        return cls(
            used,
            {(d.purpose, d.step): [next(every) for _ in range(d.number)] for d in draws},
            samples,
            agent,
        )

    def draw(
        self, purpose: str, size: int, number: int = 1, step: int = 0, pool: Pool = "all"
    ) -> list[Batch]:
        return self.batches[purpose, step][:number] if number else []
