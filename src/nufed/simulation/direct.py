"""The direct engine: one agent after another, on tensors as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nufed.algorithm import Algorithm, ClientResult, State
from nufed.data import Federation
from nufed.evaluate import AgentScores, Measure, evaluate_agent
from nufed.objective import Objective
from nufed.simulation.engine import work_of


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
        results = {}
        for agent, state in states.items():
            batches = self.federation.batches(agent, self.seed, "train", round)
            with work_of([agent], f"round {round}"):
                results[agent] = algorithm.client_update(self.objective, received, state, batches)
        return results

    def evaluate(
        self,
        algorithm: Algorithm,
        server: State,
        states: Mapping[int, State],
        *,
        steps: int,
        measure: Measure,
    ) -> list[AgentScores]:
        scores = []
        for agent, state in states.items():
            with work_of([agent], "evaluation"):
                scores.append(
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
                )
        return scores
