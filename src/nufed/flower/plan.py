"""What is trained, and with whom: the same at the server and at every site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nufed.aggregate import Mean
from nufed.algorithm import Algorithm, State
from nufed.data import Samples, ScoredOn, SmallAgents, choose_unseen
from nufed.errors import InputError, require
from nufed.evaluate import EvalLr, Measure, accuracy
from nufed.flower.privacy import Privacy
from nufed.objective import Objective
from nufed.server import Rules, cohort_size, to_send


@dataclass(frozen=True)
class Plan:
    """A training, made from the same configuration at the server and at every site.

    Args:
        algorithm: what is trained.
        objective: the model and its loss; the server's initial weights are the ones that count.
        agents: how many sites there are; each has a number of its own, from 0.
        rounds: communication rounds.
        participation: the share of agents that is asked in a round.
        seed: what cohorts, splits and batches are drawn from.
        unseen_agents: how many agents are kept from training, and only evaluated.
        validation, test: the shares of a site's samples that it does not train on.
        scored_on: the part that it is scored on.
        small_agents: what a site with fewer training samples than a batch does.
        eval_steps: fine-tuning steps of the evaluation.
        eval_lr: whether its step size is also chosen on validation samples, as in a configuration.
        measure: what sites are scored by.
        rules: when the server takes a round.
        threads: torch's threads at server and sites; bits depend on it.
        deadline: seconds that sites have for their work of a round, until all of it has arrived.
        wait: seconds that the server waits at the start for all sites, later for as many as a round
            needs; and that a new site has to say who it is.
        like: a sample like those of all sites; None: they are not compared with one.
        privacy: what sites do to updates before they leave; None: they send them as they are.
    """

    algorithm: Algorithm
    objective: Objective
    agents: int
    rounds: int
    participation: float = 1.0
    seed: int = 0
    unseen_agents: int = 0
    validation: float = 0.0
    test: float = 0.2
    scored_on: ScoredOn = "test"
    small_agents: SmallAgents = "refuse"
    eval_steps: int = 1
    eval_lr: EvalLr = "as_trained"
    measure: Measure = Measure("accuracy")
    rules: Rules = Rules()
    threads: int = 1
    deadline: float = 600.0
    wait: float = 60.0
    like: Samples | None = None
    privacy: Privacy | None = None

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
        if self.privacy is not None:
            self._check_private()

    def _check_private(self) -> None:
        """Refuse what epsilon does not hold for."""
        uniform = getattr(self.algorithm, "aggregation", None) == Mean()
        unknown = set(self.algorithm.sends) - set(self.algorithm.receives)
        for wrong, what in (
            (not uniform, "updates that are not combined by their uniform mean"),
            (self.rules.max_update_norm is not None, "max_update_norm"),
            (self.keeps_state, "an algorithm whose agents keep a state"),
            (unknown, "an algorithm whose agents send vectors that they do not receive"),
        ):
            if wrong:
                raise InputError(
                    f"privacy: its epsilon does not hold with {what}; remove that, or [privacy]"
                )

    @cached_property
    def seen(self) -> Sequence[int]:
        """The agents that take part in training."""
        unseen = choose_unseen(self.agents, self.unseen_agents, self.seed)
        return [agent for agent in range(self.agents) if agent not in unseen]

    @property
    def cohort(self) -> int:
        """How many of them are asked in a round."""
        return cohort_size(len(self.seen), self.participation)

    @property
    def sends_scores(self) -> bool:
        """Whether sites tell how they score."""
        return self.privacy is None or self.privacy.scores

    @property
    def scores_by_class(self) -> bool:
        """Whether they tell it class by class too."""
        return self.measure.metric is accuracy and (self.like is None or bool(self.like.classes))

    def start(self) -> State:
        """The server's state before the first round."""
        return self.algorithm.server_init(self.objective, self.objective.initial())

    @cached_property
    def keeps_state(self) -> bool:
        """Whether sites keep something from one round to the next."""
        return bool(self.algorithm.client_init(self.objective.initial()))

    def received_like(self) -> State:
        """Vectors shaped like those that a site receives."""
        return to_send(self.algorithm, self.start())

    def check_data(self, samples: Samples) -> None:
        """Refuse a site's data that is not like that of the others."""
        if self.like is None:
            return
        if samples.input_shape != self.like.input_shape:
            raise InputError(
                f"this site's inputs have shape {samples.input_shape}: federation.input_shape is "
                f"{list(self.like.input_shape)}"
            )
        if isinstance(samples.inputs, Tensor) and samples.inputs.dtype == torch.uint8:
            raise InputError(
                "this site's inputs are bytes: load them as the numbers that the model takes, for "
                "example inputs / 255"
            )
        if bool(samples.classes) != bool(self.like.classes):
            raise InputError(
                "this site's targets are "
                + ("class numbers" if samples.classes else "no class numbers")
                + ": federation.classes says otherwise"
            )
        if samples.outputs > self.like.outputs or (
            not samples.classes and samples.outputs != self.like.outputs
        ):
            raise InputError(
                f"this site's targets need {samples.outputs} outputs: the federation has "
                f"{self.like.outputs}"
            )
