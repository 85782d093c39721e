"""What an engine is: how an algorithm is run over agents; and the direct one, agent by agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nufed.algorithms.protocol import AgentContext, AgentResult, Algorithm, Context, State
from nufed.data import Federation
from nufed.errors import NufedError, TrainingError
from nufed.evaluate import AgentScores, Measure, Scoring, evaluate_agent, evaluation_context
from nufed.objective import Objective
from nufed.server import Downlink

EngineName: TypeAlias = Literal[
    "direct", "direct_onednn", "closed_form", "batched", "gram", "gram_onednn"
]
States: TypeAlias = Mapping[int, State | None]
"""The states of agents to evaluate; None for an agent without a state (a newcomer).

Engines look up few at a time: a mapping may read them from disk (:class:`nufed.server.StatesOf`).
"""


@contextmanager
def work_of(agents: Sequence[int], where: str) -> Iterator[None]:
    """Turn any exception of a module into a :class:`TrainingError` that names the agents."""
    try:
        yield
    except NufedError:
        raise
    except Exception as error:
        who = "agent" if len(agents) == 1 else "one of agents"
        names = ", ".join(map(str, agents))
        raise TrainingError(
            f"{who} {names} failed in {where}: {type(error).__name__}: {error}"
        ) from error


class Engine:
    """Runs an algorithm's agents on this machine, chunk by chunk.

    An engine maps work over agents and decides nothing: its results depend neither on the order of
    agents nor on how work is scheduled. One engine says how agents are chunked, and how a chunk is
    trained and scored.
    """

    objective: Objective
    federation: Federation
    seed: int
    parallel: int = 1  # chunks that it processes at the same time

    def chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        """The agents in groups that are processed together, deterministically.

        The chunks of some of these groups, in order, are the same groups.
        """
        raise NotImplementedError

    def scored_chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        """The same for an evaluation."""
        return self.chunks(algorithm, agents)

    def agent_updates(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], context: Context
    ) -> dict[int, AgentResult]:
        """The local training of a round, for every agent in ``states``."""
        results: dict[int, AgentResult] = {}
        for chunk in self.chunks(algorithm, list(states)):
            with work_of(chunk, f"round {context.round}"):
                some = {agent: states[agent] for agent in chunk}
                results |= self._update_chunk(algorithm, received, some, context)
        return results

    def evaluate(
        self,
        algorithm: Algorithm,
        received: State,
        states: States,
        *,
        steps: int,
        measure: Measure,
    ) -> list[AgentScores]:
        """The scores of every agent in ``states``, of the global model and of the personal one
        after 0 … ``steps`` fine-tuning steps."""
        scoring = Scoring(steps, measure, part=self.federation.scored_on)
        (scores,) = self.evaluate_scales(algorithm, received, states, scoring)
        return scores

    def evaluate_scales(
        self, algorithm: Algorithm, received: State, states: States, scoring: Scoring
    ) -> list[list[AgentScores]]:
        """Scores as by :meth:`evaluate`, for each scale of the step size of fine-tuning.

        Agents without samples in the part that is scored are omitted.
        """
        federation = self.federation.scoring(scoring.part)
        agents = federation.scorable(states)
        scores: list[dict[int, AgentScores]] = [{} for _ in scoring.scales]
        for chunk in self.scored_chunks(algorithm, agents):
            with work_of(chunk, "evaluation"):
                some = {agent: states[agent] for agent in chunk}
                scored = self._evaluate_chunk(algorithm, federation, received, some, scoring)
            for by_agent, of_chunk in zip(scores, scored, strict=True):
                by_agent |= of_chunk
        return [[by_agent[agent] for agent in agents] for by_agent in scores]

    def _update_chunk(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], context: Context
    ) -> dict[int, AgentResult]:
        """The local training of a chunk."""
        raise NotImplementedError

    def _evaluate_chunk(
        self,
        algorithm: Algorithm,
        federation: Federation,
        received: State,
        states: States,
        scoring: Scoring,
    ) -> list[dict[int, AgentScores]]:
        """The scores of a chunk by scale and agent; ``federation`` says what is scored."""
        raise NotImplementedError


DRAWN_AT_ONCE = 1024  # batches that are drawn before agents train: between products it is slow


@dataclass(frozen=True)
class DirectEngine(Engine):
    """One agent at a time."""

    objective: Objective
    federation: Federation
    seed: int

    def __post_init__(self) -> None:
        vars(self)["federation"] = self.federation.on(self.objective.initial().device)

    def chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        return [[agent] for agent in agents]

    def agent_updates(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], context: Context
    ) -> dict[int, AgentResult]:
        agents, results, down = list(states), {}, Downlink.of(received)
        together = max(1, DRAWN_AT_ONCE // max(1, sum(d.number for d in algorithm.update_draws())))
        for start in range(0, len(agents), together):
            some = agents[start : start + together]
            contexts = [self._context(algorithm, agent, context) for agent in some]
            for agent, of_agent in zip(some, contexts, strict=True):
                with work_of([agent], f"round {context.round}"):
                    results[agent] = algorithm.agent_update(of_agent, down.to(agent), states[agent])
        return results

    def _context(self, algorithm: Algorithm, agent: int, context: Context) -> AgentContext:
        """What an agent knows, with its batches drawn."""
        batches = self.federation.batches(agent, self.seed, "train", context.round)
        with work_of([agent], f"round {context.round}"):
            batches = batches.ahead(algorithm.update_draws())
        return AgentContext.of(context, self.objective, batches, batches.samples)

    def _evaluate_chunk(
        self,
        algorithm: Algorithm,
        federation: Federation,
        received: State,
        states: States,
        scoring: Scoring,
    ) -> list[dict[int, AgentScores]]:
        ((agent, state),) = states.items()
        draws = algorithm.personal_draws(scoring.steps)  # once for all scales
        batches = federation.batches(agent, self.seed, "evaluate").ahead(draws)
        context = evaluation_context(federation, self.objective, batches, batches.samples)
        received = Downlink.of(received).to(agent)
        scores = evaluate_agent(algorithm, context, received, state, federation, scoring)
        return [{agent: each} for each in scores]
