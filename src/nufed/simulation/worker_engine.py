"""The worker engine: runs another engine's chunks of agents in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from nufed.algorithms.protocol import AgentResult, Algorithm, Context, State
from nufed.evaluate import AgentScores, Scoring
from nufed.server import Downlink
from nufed.simulation.engine import Engine, States
from nufed.simulation.worker_pool import Buffer, Notify, Pool, SharedBuffer, Workers, aligned_bytes

LOADED_BYTES = 32 * 2**20  # of states that are evaluated together


class WorkerEngine(Engine):
    """Runs the chunks of an engine in processes.

    Gives the bits of that engine alone, for any number of workers: the chunks and the computation
    on each are the same. The processes are reused from round to round, until :meth:`close`.
    Spawned processes need ``rebuild``, which makes the same engine there.
    """

    def __init__(
        self, engine: Engine, workers: int, rebuild: Callable[[], Engine] | None = None
    ) -> None:
        self._take(engine)
        self.parallel, self._rebuild = workers, rebuild
        self._workers: Pool | None = None
        self._buffer: Buffer = SharedBuffer(0)
        self._objects: list[object] = []  # algorithms and measures that the processes inherited

    def __getstate__(self) -> dict[str, Any]:
        """For spawned processes: the engine itself is rebuilt there."""
        if self._rebuild is None:
            raise TypeError("an engine without `rebuild` can't be sent to a spawned process")
        left_out = ("_workers", "_engine", "objective", "federation")
        return vars(self) | dict.fromkeys(left_out)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        assert self._rebuild is not None
        self._take(self._rebuild())

    def _take(self, engine: Engine) -> None:
        self._engine, self.seed = engine, engine.seed
        self.objective, self.federation = engine.objective, engine.federation

    def chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        return self._engine.chunks(algorithm, agents)

    def scored_chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        return self._engine.scored_chunks(algorithm, agents)

    def agent_updates(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], context: Context
    ) -> dict[int, AgentResult]:
        down = Downlink.of(received)
        individual = {agent: down.own(agent) for agent in states}
        like = down.to(next(iter(states)))
        sent = aligned_bytes({n: like[n] for n in algorithm.sends if n in like})
        kept = [(aligned_bytes(individual[agent]), aligned_bytes(s)) for agent, s in states.items()]
        # the broadcast; then for every agent what it alone receives, its state, the vectors that it
        # sends, its next state
        sizes = [aligned_bytes(down.shared), *chain(*((o, s, sent, s) for o, s in kept))]
        spans, write = self._prepare([algorithm], sizes), self._buffer.write
        layout = write(down.shared, next(spans))
        layouts = {
            a: (write(individual[a], next(spans)), write(s, next(spans)), next(spans), next(spans))
            for a, s in states.items()
        }
        chunks = [
            {agent: layouts[agent] for agent in chunk}
            for chunk in self.chunks(algorithm, list(states))
        ]
        results = self._map(
            [("update", self._index(algorithm), layout, chunk, context) for chunk in chunks],
            f"round {context.round}",
        )
        return {
            agent: AgentResult(self._buffer.read(vectors), self._buffer.read(state), cost)
            for result in results
            for agent, (vectors, state, cost) in result.items()
        }

    def evaluate_scales(
        self, algorithm: Algorithm, received: State, states: States, scoring: Scoring
    ) -> list[list[AgentScores]]:
        agents, measure = self.federation.scoring(scoring.part).scorable(states), scoring.measure
        how = (list(scoring.scales), scoring.part, scoring.steps)
        scores: list[dict[int, AgentScores]] = [{} for _ in scoring.scales]
        down = Downlink.of(received)
        for chunks in self._loaded(self.scored_chunks(algorithm, agents), states, down):
            kept = [part or {} for chunk in chunks for pair in chunk.values() for part in pair]
            sizes = [aligned_bytes(down.shared), *map(aligned_bytes, kept)]
            spans = self._prepare([algorithm, measure], sizes)
            layout = self._buffer.write(down.shared, next(spans))
            indices = self._index(algorithm), self._index(measure)
            written = [
                {
                    a: (
                        self._buffer.write(individual, next(spans)),
                        self._write_state(s, next(spans)),
                    )
                    for a, (individual, s) in chunk.items()
                }
                for chunk in chunks
            ]
            results = self._map(
                [("evaluate", *indices, how, layout, chunk, None) for chunk in written],
                "evaluation",
            )
            for result in results:
                for by_agent, of_chunk in zip(scores, result, strict=True):
                    by_agent |= {score.agent: score for score in of_chunk}
        return [[by_agent[agent] for agent in agents] for by_agent in scores]

    def _loaded(
        self, chunks: list[list[int]], states: States, down: Downlink
    ) -> Iterator[list[dict[int, tuple[State, State | None]]]]:
        """The chunks with what each agent alone receives and its state, as many at a time as fit
        into :data:`LOADED_BYTES`; at least one per worker."""
        loaded: list[dict[int, tuple[State, State | None]]] = []
        size = 0
        for chunk in chunks:
            loaded.append({agent: (down.own(agent), states[agent]) for agent in chunk})
            size += sum(
                aligned_bytes(individual) + aligned_bytes(state or {})
                for individual, state in loaded[-1].values()
            )
            if size >= LOADED_BYTES and len(loaded) >= self.parallel:
                yield loaded
                loaded, size = [], 0
        if loaded:
            yield loaded

    def _write_state(self, state: State | None, span: range) -> Any:
        return None if state is None else self._buffer.write(state, span)

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
        """Spans of the given sizes in the buffer, which the processes share.

        Processes are started again for a larger buffer or for objects that they have not inherited.
        """
        missing = [o for o in objects if not any(o is known for known in self._objects)]
        if missing or sum(sizes) > self._buffer.size or self._workers is None:
            self.close()
            self._objects += missing
            self._buffer = SharedBuffer(max(sum(sizes), self._buffer.size))
            self._workers = Workers(self.parallel, self._work)
        return (range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))

    def _index(self, thing: object) -> Any:
        """What tasks hold instead of an algorithm or measure."""
        return next(i for i, known in enumerate(self._objects) if known is thing)

    def _object(self, index: Any) -> Any:
        """The object of an index, in a worker process."""
        return self._objects[index]

    def _map(self, tasks: list[Any], where: str) -> list[Any]:
        def describe(task: Any, last: Any) -> str:
            return f"agents {', '.join(map(str, task[-2]))} in {where}"

        assert self._workers is not None
        try:
            return self._workers.map(tasks, describe)
        except BaseException:
            self.close()  # some may still be working
            raise

    def _work(self, task: Any, notify: Notify) -> Any:
        """Process one chunk, in a worker process."""
        kind, *rest = task
        if kind == "evaluate":
            algorithm, measure, (scales, part, steps), layout, chunk, _ = rest
            return self._engine.evaluate_scales(
                self._object(algorithm),
                self._received(layout, chunk),
                {a: None if s is None else self._buffer.read(s) for a, (_, s) in chunk.items()},
                Scoring(steps, self._object(measure), scales, part),
            )
        algorithm, layout, chunk, context = rest
        results = self._engine.agent_updates(
            self._object(algorithm),
            self._received(layout, chunk),
            {agent: self._buffer.read(state) for agent, (_, state, _, _) in chunk.items()},
            context,
        )
        return {
            agent: (
                self._buffer.write(result.vectors, chunk[agent][2]),
                self._buffer.write(result.state, chunk[agent][3]),
                result.cost,
            )
            for agent, result in results.items()
        }

    def _received(self, layout: Any, chunk: Mapping[int, Sequence[Any]]) -> Downlink:
        """The vectors that the agents of a chunk receive, in a worker process."""
        individual: dict[int | None, State] = {
            a: self._buffer.read(parts[0]) for a, parts in chunk.items()
        }
        return Downlink(self._buffer.read(layout), lambda agent: individual.get(agent, {}))
