"""The direct engine: one agent after another, on tensors as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nufed.algorithm import Algorithm, ClientResult, State
from nufed.data import Federation
from nufed.evaluate import AgentScores, Measure, evaluate_agent
from nufed.objective import Objective


@dataclass(frozen=True)
class DirectEngine:
    """Every agent alone (an :class:`~nufed.simulation.engine.Engine`)."""

    objective: Objective
    federation: Federation
    seed: int

    def chunks(self, algorithm: Algorithm, agents: Sequence[int]) -> list[list[int]]:
        return [[agent] for agent in agents]

    def client_updates(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], round: int
    ) -> dict[int, ClientResult]:
        return {
            agent: algorithm.client_update(
                self.objective,
                received,
                state,
                self.federation.batches(agent, self.seed, "train", round),
            )
            for agent, state in states.items()
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
        return [
            evaluate_agent(
                algorithm,
                self.objective,
                self.federation,
                agent,
                server,
                state,
                seed=self.seed,
                steps=steps,
                measure=measure,
            )
            for agent, state in states.items()
        ]
