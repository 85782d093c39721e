"""What the null baselines ``untrained`` and ``local`` run, the same in simulation and at sites."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

from nufed.algorithms.gmeta import GMeta, local_sgd
from nufed.algorithms.protocol import AgentContext, Algorithm, Personal, State
from nufed.objective import AnyObjective


class OwnModel(GMeta):
    """Evaluates the model in each agent's state."""

    @classmethod
    def like(cls, local: GMeta) -> OwnModel:
        """With the same settings."""
        return cls(**{field.name: getattr(local, field.name) for field in fields(local)})

    @property
    def combines(self) -> Literal["elementwise", "linearly"]:
        return "elementwise"

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        return {"model": received["model"]}

    def global_model(self, objective: AnyObjective, received: State) -> None:
        return None

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        return Personal({"model": (received if state is None else state)["model"]})


def local_training(like: Algorithm, rounds: int) -> GMeta:
    """SGD at one agent for all rounds at once, with the settings of a method.

    Its steps, or epochs, are those of all rounds, its local optimiser that of the method; a
    schedule stays at the step size of the first round, and momentum is not reset between rounds.
    """
    alone = local_sgd(like)
    return replace(
        alone, local_steps=alone.local_steps * rounds, local_epochs=alone.local_epochs * rounds
    )
