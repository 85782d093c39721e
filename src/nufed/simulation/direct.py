"""The direct engine: one agent after another, on tensors as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nufed.algorithm import Algorithm, ClientResult, State
from nufed.data import Federation, ScoredOn
from nufed.evaluate import AgentScores, Measure, evaluate_agent
from nufed.objective import Objective
from nufed.simulation.engine import EvaluatesScales, work_of


@dataclass(frozen=True)
class DirectEngine(EvaluatesScales):
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
        federation = self.federation.scoring(part)
        scores: list[list[AgentScores]] = [[] for _ in scales]
        for agent in federation.scorable(states):
            with work_of([agent], "evaluation"):
                for own, scale in zip(scores, scales, strict=True):
                    own.append(
                        evaluate_agent(
                            algorithm,
                            self.objective,
                            federation,
                            agent,
                            server,
                            states[agent],
                            seed=self.seed,
                            steps=steps,
                            measure=measure,
                            scale=scale,
                        )
                    )
        return scores
