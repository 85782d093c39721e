"""The direct engine: one agent at a time, on plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nufed.algorithms.protocol import AgentContext, AgentResult, Algorithm, Context, State
from nufed.data import Federation, ScoredOn
from nufed.evaluate import AgentScores, Measure, evaluate_agent
from nufed.objective import Objective
from nufed.simulation.engine import EvaluatesScales, States, work_of

DRAWN_AT_ONCE = 1024  # batches that are drawn before agents train: between products it is slow


@dataclass(frozen=True)
class DirectEngine(EvaluatesScales):
    """One agent at a time (an :class:`~nufed.simulation.engine.Engine`)."""

    objective: Objective
    federation: Federation
    seed: int

    def chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        return [[agent] for agent in agents]

    def agent_updates(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], context: Context
    ) -> dict[int, AgentResult]:
        agents, results = list(states), {}
        together = max(1, DRAWN_AT_ONCE // max(1, sum(d.number for d in algorithm.update_draws())))
        for start in range(0, len(agents), together):
            some = agents[start : start + together]
            contexts = [self._context(algorithm, agent, context) for agent in some]
            for agent, own in zip(some, contexts, strict=True):
                with work_of([agent], f"round {context.round}"):
                    results[agent] = algorithm.agent_update(own, received, states[agent])
        return results

    def _context(self, algorithm: Algorithm, agent: int, context: Context) -> AgentContext:
        """What an agent knows, with its batches drawn."""
        batches = self.federation.batches(agent, self.seed, "train", context.round)
        with work_of([agent], f"round {context.round}"):
            batches = batches.ahead(algorithm.update_draws())
        return AgentContext.of(context, self.objective, batches, batches.samples)

    def evaluate_scales(
        self,
        algorithm: Algorithm,
        received: State,
        states: States,
        *,
        steps: int,
        measure: Measure,
        scales: Sequence[float],
        part: ScoredOn,
    ) -> list[list[AgentScores]]:
        federation = self.federation.scoring(part)
        scores: list[list[AgentScores]] = [[] for _ in scales]
        for agent in federation.scorable(states):
            with work_of([agent], "evaluation"):
                found = evaluate_agent(
                    algorithm,
                    self.objective,
                    federation,
                    agent,
                    received,
                    states[agent],
                    seed=self.seed,
                    steps=steps,
                    measure=measure,
                    scales=scales,
                )
            for own, score in zip(scores, found, strict=True):
                own.append(score)
        return scores
