"""The worker engine: another engine's chunks of agents, spread over processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from nufed.algorithm import Algorithm, ClientResult, State
from nufed.data import Federation, ScoredOn
from nufed.evaluate import AgentScores, Measure
from nufed.objective import Objective
from nufed.simulation.engine import Engine, EvaluatesScales
from nufed.simulation.processes import Note, Workers
from nufed.simulation.shared import Board, room_for


class WorkerEngine(EvaluatesScales):
    """Runs the chunks of an engine in processes (an :class:`~nufed.simulation.engine.Engine`).

    The same bits as that engine alone, for any number of workers: the chunks are the same, and each
    is worked on as there. The processes are kept from round to round, until :meth:`close`.
    """

    def __init__(self, engine: Engine, workers: int) -> None:
        self._engine, self._count = engine, workers
        self._workers: Workers | None = None
        self._board = Board(0)
        self._objects: list[object] = []  # algorithms and measures that the processes have

    @property
    def objective(self) -> Objective:
        return self._engine.objective

    @property
    def federation(self) -> Federation:
        return self._engine.federation

    @property
    def seed(self) -> int:
        return self._engine.seed

    def chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        return self._engine.chunks(algorithm, agents)

    def client_updates(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], round: int
    ) -> dict[int, ClientResult]:
        vectors = room_for({n: received[n] for n in algorithm.sends if n in received})
        rooms = {agent: room_for(state) for agent, state in states.items()}
        # what is received; then for every agent its state, the vectors it sends, its next state
        sizes = [room_for(received), *chain(*((own, vectors, own) for own in rooms.values()))]
        places = self._prepare([algorithm], sizes)
        layout = self._board.put(received, next(places))
        own = {
            agent: (self._board.put(state, next(places)), next(places), next(places))
            for agent, state in states.items()
        }
        chunks = [
            {agent: own[agent] for agent in chunk} for chunk in self.chunks(algorithm, list(states))
        ]
        answers = self._ask(
            [("update", self._number(algorithm), layout, chunk, round) for chunk in chunks],
            f"round {round}",
        )
        return {
            agent: ClientResult(self._board.take(vectors), self._board.take(state), cost)
            for answer in answers
            for agent, (vectors, state, cost) in answer.items()
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
        sizes = [room_for(server), *map(room_for, states.values())]
        places = self._prepare([algorithm, measure], sizes)
        layout = self._board.put(server, next(places))
        own = {agent: self._board.put(state, next(places)) for agent, state in states.items()}
        numbers = self._number(algorithm), self._number(measure)
        agents = self.federation.scoring(part).scorable(states)
        chunks = [{a: own[a] for a in c} for c in self.chunks(algorithm, agents)]
        how = (list(scales), part, steps)
        answers = self._ask(
            [("evaluate", *numbers, how, layout, chunk, None) for chunk in chunks], "evaluation"
        )
        found: list[dict[int, AgentScores]] = [{} for _ in scales]
        for answer in answers:
            for own_scale, scores in zip(found, answer, strict=True):
                own_scale |= {score.agent: score for score in scores}
        return [[by_agent[agent] for agent in agents] for by_agent in found]

    def __enter__(self) -> WorkerEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _prepare(self, objects: list[object], sizes: list[int]) -> Iterator[range]:
        """Places for so many bytes each on the board, with processes that see it and the objects.

        What processes have to share they have since they were forked.
        """
        missing = [o for o in objects if not any(o is known for known in self._objects)]
        if missing or sum(sizes) > self._board.size or self._workers is None:
            self.close()
            self._objects += missing
            self._board = Board(max(sum(sizes), self._board.size))
            self._workers = Workers(self._count, self._answer)
        return (range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))

    def _number(self, thing: object) -> int:
        return next(i for i, known in enumerate(self._objects) if known is thing)

    def _ask(self, questions: list[Any], where: str) -> list[Any]:
        def describe(question: Any, note: Any) -> str:
            return f"agents {', '.join(map(str, question[-2]))} in {where}"

        assert self._workers is not None
        try:
            return self._workers.ask(questions, describe)
        except BaseException:
            self.close()  # some may still be at work
            raise

    def _answer(self, question: Any, note: Note) -> Any:
        """In a process: the work on one chunk."""
        kind, *rest = question
        if kind == "evaluate":
            algorithm, measure, (scales, part, steps), layout, chunk, _ = rest
            return self._engine.evaluate_scales(
                self._objects[algorithm],
                self._board.take(layout),
                {agent: self._board.take(state) for agent, state in chunk.items()},
                steps=steps,
                measure=self._objects[measure],
                scales=scales,
                part=part,
            )
        number, layout, chunk, round = rest
        results = self._engine.client_updates(
            self._objects[number],
            self._board.take(layout),
            {agent: self._board.take(state) for agent, (state, _, _) in chunk.items()},
            round,
        )
        return {
            agent: (
                self._board.put(result.vectors, chunk[agent][1]),
                self._board.put(result.state, chunk[agent][2]),
                result.cost,
            )
            for agent, result in results.items()
        }
