"""What server and sites agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from nufed.algorithm import Algorithm, State
from nufed.data import SmallAgents, choose_unseen
from nufed.errors import require
from nufed.evaluate import Measure
from nufed.objective import Objective
from nufed.server import Rules, to_send


@dataclass(frozen=True)
class Plan:
    """A training, made by the same function at the server and at every site.

    Args:
        algorithm: what is trained.
        objective: the model and its loss; the server's initial weights are the ones that count.
        agents: how many sites there are; each has a number of its own, from 0.
        rounds: communication rounds.
        participation: the share of agents that is asked in a round.
        seed: what cohorts, splits and batches are drawn from.
        unseen_agents: how many agents are kept from training, and only evaluated.
        test: the share of a site's samples that it tests on.
        small_agents: what a site with fewer training samples than a batch does.
        eval_steps: fine-tuning steps of the evaluation.
        measure: what sites are scored by.
        rules: when the server takes a round.
        threads: torch's threads at server and sites; bits depend on it.
        deadline: seconds that sites have for their work of a round.
        wait: seconds that the server waits at the start for all sites to come, and a new site has
            to say who it is.
    """

    algorithm: Algorithm
    objective: Objective
    agents: int
    rounds: int
    participation: float = 1.0
    seed: int = 0
    unseen_agents: int = 0
    test: float = 0.2
    small_agents: SmallAgents = "refuse"
    eval_steps: int = 1
    measure: Measure = Measure("accuracy")
    rules: Rules = Rules()
    threads: int = 1
    deadline: float = 600.0
    wait: float = 60.0

    def __post_init__(self) -> None:
        for name, least in (("agents", 1), ("rounds", 0), ("eval_steps", 0), ("threads", 1)):
            value = getattr(self, name)
            ok = isinstance(value, int) and value >= least
            require(ok, name, value, f"must be a whole number, {least} or more")
        for name in ("deadline", "wait"):
            value = getattr(self, name)
            require(0 < value < float("inf"), name, value, "must be a number of seconds above 0")
        require(0 < self.test < 1, "test", self.test, "must be above 0 and below 1")
        choose_unseen(self.agents, self.unseen_agents, self.seed)

    @cached_property
    def seen(self) -> Sequence[int]:
        """The agents that take part in training."""
        unseen = choose_unseen(self.agents, self.unseen_agents, self.seed)
        return [agent for agent in range(self.agents) if agent not in unseen]

    def start(self) -> State:
        """The server's state before the first round."""
        return self.algorithm.server_init(self.objective, self.objective.initial())

    @property
    def keeps_state(self) -> bool:
        """Whether sites keep something from one round to the next."""
        return bool(self.algorithm.client_init(self.objective.initial()))

    def received_like(self) -> State:
        """Vectors shaped like those that a site receives."""
        return to_send(self.algorithm, self.start())
