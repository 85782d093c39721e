"""The direct engine: one agent at a time, on plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nufed.algorithms.protocol import AgentContext, AgentResult, Algorithm, Context, State
from nufed.data import Federation
from nufed.evaluate import AgentScores, Scoring, evaluate_agent, evaluation_context
from nufed.objective import Objective
from nufed.server import Downlink
from nufed.simulation.engine import Engine, States, work_of

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
