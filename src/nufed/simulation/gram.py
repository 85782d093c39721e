"""The Gram engine: agents of models whose first layer is linear, in Gram space (nufed.gram)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from nufed.algorithm import Algorithm, ClientResult, Combining, Draw, State
from nufed.data import AgentBatches, Federation, ScoredOn
from nufed.data.partition import Rows
from nufed.evaluate import AgentScores, Measure, score_agent
from nufed.gram import FirstLayer, GramObjective, GramVector
from nufed.objective import Batch, Objective
from nufed.simulation.batched import even_chunks
from nufed.simulation.engine import EvaluatesScales, work_of
from nufed.simulation.shared import shared_zeros


class GramEngine(EvaluatesScales):
    """Chunks of agents in Gram space (an :class:`~nufed.simulation.engine.Engine`).

    The algorithm must combine vectors linearly (:class:`nufed.algorithm.Combining`) and use nothing
    but the model. The matrices K of the agents' training parts are computed when first needed and
    kept, once for all processes forked after the engine was made.
    """

    def __init__(
        self,
        objective: Objective,
        federation: Federation,
        seed: int,
        layer: FirstLayer,
        most: int = 5,
    ) -> None:
        self.objective, self.federation, self.seed = objective, federation, seed
        self._layer, self._most = layer, most
        largest = federation.split.most_rows
        agents = len(federation.split.agents)
        self._grams = shared_zeros((agents, largest, largest), objective.dtype)
        self._gram_is_there = shared_zeros((agents,), torch.uint8)
        self._test_grams: dict[tuple[int, tuple[Draw, ...], ScoredOn], Tensor] = {}
        self._table = torch.empty(0, layer.inputs, dtype=objective.dtype)
        self._touched = torch.empty(largest, layer.inputs, dtype=objective.dtype)

    def chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        return even_chunks(self.federation, algorithm.batch_size, agents, self._most)

    def client_updates(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], round: int
    ) -> dict[int, ClientResult]:
        results: dict[int, ClientResult] = {}
        for chunk in self.chunks(algorithm, list(states)):
            with work_of(chunk, f"round {round}"):
                results |= self._update_chunk(algorithm, received["model"], chunk, round)
        return results

    def _update_chunk(
        self, algorithm: Algorithm, model: Tensor, chunk: list[int], round: int
    ) -> dict[int, ClientResult]:
        assert isinstance(algorithm, Combining)
        sources = [self.federation.batches(agent, self.seed, "train", round) for agent in chunk]
        batches = PlacedBatches.make(sources, algorithm.update_draws())
        space = self._training_space(model, chunk, batches.used)
        result = algorithm.client_update(space.objective, space.start, {}, batches)
        inputs = space.inputs
        del space  # the start of a large model
        w = cast(GramVector, result.vectors["model"])
        return {
            agent: ClientResult(
                {"model": self._vector(model, w, row, batches.used[row], inputs[row])},
                {},
                result.cost,
            )
            for row, agent in enumerate(chunk)
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
        assert isinstance(algorithm, Combining)
        federation = self.federation.scoring(part)
        agents = federation.scorable(states)
        draws = tuple(algorithm.personal_draws(steps))
        scores: list[dict[int, AgentScores]] = [{} for _ in scales]
        for chunk in self.chunks(algorithm, agents):
            with work_of(chunk, "evaluation"):
                sources = [federation.batches(agent, self.seed, "evaluate") for agent in chunk]
                batches = PlacedBatches.make(sources, draws, among_used=True)
                space = self._test_space(federation, server["model"], chunk, batches.used, draws)
                for found, scale in zip(scores, scales, strict=True):
                    models = algorithm.personalize(
                        space.objective, space.start, {}, batches, steps, scale
                    )
                    found |= self._score_chunk(federation, chunk, batches, space, models, measure)
        return [[found[agent] for agent in agents] for found in scores]

    def _score_chunk(
        self,
        federation: Federation,
        chunk: list[int],
        batches: PlacedBatches,
        space: _Space,
        models: Iterable[Any],
        measure: Measure,
    ) -> dict[int, AgentScores]:
        trained, tested = max(map(len, batches.used)), len(space.objective.start[0])
        places = torch.arange(trained, tested).expand(len(chunk), -1)
        outputs = [space.objective.predict(w, places) for w in models]
        scores = {}
        for row, agent in enumerate(chunk):
            size = len(federation.scored_rows(agent))
            own = (each[row, :size] for each in outputs)
            scores[agent] = score_agent(self.objective, federation, agent, own, measure)
        return scores

    def _vector(self, model: Tensor, w: GramVector, row: int, used: Rows, inputs: Tensor) -> Tensor:
        """The flat vector of the agent in this row, whose used samples are ``inputs``."""
        scale, places, rows, others = w.of(row)
        if len(places) > len(used):  # rows of samples that another agent of the chunk used
            mine = np.isin(places, used)
            places, rows = places[mine], rows[torch.from_numpy(mine)]
        touched = self._touched[: len(places)]
        index = torch.from_numpy(np.searchsorted(used, places))
        torch.index_select(inputs, 0, index, out=touched)
        return self._layer.vector(model, scale, rows, touched, others)

    def _training_space(self, model: Tensor, chunk: list[int], used: list[Rows]) -> _Space:
        """The Gram space around a model; a sample's place is its place in the training part."""
        self._make_grams(chunk)
        train = self.federation.split.train
        rows = [train[agent][own] for agent, own in zip(chunk, used, strict=True)]
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
        """The same for fine-tuning and test; places count the used samples, then those for test."""
        split = federation.split
        both = [
            (split.train[agent][own], federation.scored_rows(agent))
            for agent, own in zip(chunk, used, strict=True)
        ]
        inputs = self._inputs([np.concatenate(pair) for pair in both])
        trained, tested = (max(map(len, column)) for column in zip(*both, strict=True))
        gram = model.new_zeros(len(chunk), trained + tested, trained)
        outputs = model.new_zeros(len(chunk), trained + tested, self._layer.outputs)
        for row, (agent, x) in enumerate(zip(chunk, inputs, strict=True)):
            n, m = map(len, both[row])
            values = self._layer.apply(model, x)
            key = agent, draws, federation.scored_on
            if key not in self._test_grams:  # the same in every round
                self._test_grams[key] = self._layer.gram(x, x[:n])
            products = self._test_grams[key]
            for table, own in ((outputs[row], values), (gram[row, :, :n], products)):
                table[:n] = own[:n]
                table[trained : trained + m] = own[n:]
        return self._space(model, gram, torch.arange(len(chunk)), outputs, [])

    def _space(
        self, model: Tensor, gram: Tensor, tables: Tensor, outputs: Tensor, inputs: list[Tensor]
    ) -> _Space:
        norm = self._layer.norm(model)
        objective = GramObjective(self.objective, self._layer, gram, tables, outputs, norm)
        start = cast(Tensor, objective.initial(self._layer.others(model)))
        return _Space(objective, {"model": start}, inputs)

    def _inputs(self, rows: list[Rows]) -> Iterator[Tensor]:
        """The samples of one agent after another, in memory that the next call uses again.

        One after another, so that what is done with them first finds them in the cache.
        """
        sizes = [len(own) for own in rows]
        if sum(sizes) > len(self._table):
            self._table = self._table.new_empty(sum(sizes), self._layer.inputs)
        for table, own in zip(torch.split(self._table[: sum(sizes)], sizes), rows, strict=True):
            self.federation.samples.fill(table, own)
            yield table

    def _make_grams(self, chunk: list[int]) -> None:
        """Compute K of the training parts that are not there yet."""
        for agent in chunk:
            rows = self.federation.split.train[agent]
            if not self._gram_is_there[agent]:
                (inputs,) = self._inputs([rows])
                self._layer.fill_gram(self._grams[agent], inputs)
                self._gram_is_there[agent] = 1


class _Space(NamedTuple):
    objective: Any  # a GramObjective, whose vectors stand where algorithms expect tensors
    start: State
    inputs: list[Tensor]


@dataclass(frozen=True)
class PlacedBatches:
    """The batches of several agents as places in their training parts (a BatchSource).

    ``used`` are each agent's places that occur, in order. With ``among_used``, batches hold places
    in that list instead.
    """

    used: list[Rows]
    batches: dict[tuple[str, int], list[Batch]]

    @classmethod
    def make(
        cls, sources: Sequence[AgentBatches], draws: Iterable[Draw], among_used: bool = False
    ) -> PlacedBatches:
        draws = [draw for draw in draws if draw.number]
        if not draws:  # no fine-tuning, only a test
            return cls([np.empty(0, dtype=np.int64) for _ in sources], {})
        picked = [[p for draw in draws for p in source.pick(*draw)] for source in sources]
        used, places, targets = [], [], []
        for source, own in zip(sources, picked, strict=True):
            stacked = np.stack([p.places for p in own])
            used.append(np.unique(stacked))
            places.append(np.searchsorted(used[-1], stacked) if among_used else stacked)
            rows = source.federation.split.train[source.agent][stacked]
            targets.append(source.federation.samples.targets[rows])
        stacks = zip(
            torch.from_numpy(np.stack(places, axis=1)),
            torch.stack(targets, dim=1),
            [p.seed for p in picked[0]],  # for training mode: nothing random may be drawn
            strict=True,
        )
        every = (Batch(*each) for each in stacks)
        return cls(
            used, {(d.purpose, d.step): [next(every) for _ in range(d.number)] for d in draws}
        )

    def draw(self, purpose: str, size: int, count: int = 1, step: int = 0) -> list[Batch]:
        return self.batches[purpose, step][:count] if count else []
