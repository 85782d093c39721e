"""A method from elsewhere, under the name "toy"; as a plugin of pytest, it registers itself."""

from dataclasses import dataclass

from nufed.algorithms import ALGORITHMS, AgentResult, Cost, LocalTraining
from nufed.settings import setting


@dataclass(frozen=True)
class Toy(LocalTraining):
    """FedAvg that sends a part of the agent's change."""

    sent: float = setting(0.5, "share of the change that is sent", above=0, most=1)

    def agent_update(self, context, received, state):
        before = received["model"]
        w = self.descend(context, before)
        vectors = {"model": before + self.sent * (w - before)}
        return AgentResult(vectors, state, Cost(self.steps_per_round(context)))


def pytest_configure(config):
    ALGORITHMS._built_in["toy"] = Toy
