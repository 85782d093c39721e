"""The direct engine: one agent after another, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nufed.algorithm import Algorithm, ClientResult, State
from nufed.data import Federation
from nufed.evaluate import AgentScores, Measure, evaluate_agent
from nufed.objective import Objective


@dataclass(frozen=True)
class DirectEngine:
    """Runs an algorithm's agents one by one, on tensors as they are.

    An engine maps work over agents and decides nothing: what it returns depends neither on the
    order of agents nor on how the work was spread.
    """

    objective: Objective
    federation: Federation
    seed: int

    def client_updates(
        self, algorithm: Algorithm, received: State, states: Mapping[int, State], round: int
    ) -> dict[int, ClientResult]:
        """The work of a round for every agent in ``states``, which holds the agents' states."""
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
        """The scores of every agent in ``states`` after 0 … ``steps`` fine-tuning steps."""
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
