"""The training plan, identical at the server and at every site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nufed.algorithms.compression import initial_residuals, update_bytes
from nufed.algorithms.protocol import Algorithm, Context, State, defines
from nufed.data import Preparation, Samples, ScoredOn, SmallAgents, choose_unseen
from nufed.data.augmentation import Augmentation
from nufed.data.samples import named_inputs
from nufed.errors import InputError, require, shown
from nufed.evaluate import GROUPS, RESAMPLES, EvalLr, Measure, accuracy
from nufed.flower.app.payload import MAX_SCALES
from nufed.flower.app.privacy import Privacy
from nufed.flower.app.registry import SiteKeys
from nufed.flower.app.replies import ReplyLimit
from nufed.flower.secure_sum.terms import MIN_SITES, threshold
from nufed.objective import Objective
from nufed.server import (
    Rules,
    cohort_size,
    counted_parameters,
    initial_server,
    sums_suffice,
    to_send,
)


@dataclass(frozen=True)
class Plan:
    """A training plan, made from the same configuration at the server and at every site.

    Args:
        algorithm: what is trained.
        objective: the model and its loss; training starts from the server's initial weights.
        agents: number of sites; each has its own number, from 0.
        rounds: communication rounds.
        participation: fraction of agents picked per round.
        seed: seed of cohorts, splits and batches.
        unseen_agents: how many agents are held out from training and only evaluated, or their
            numbers as text.
        validation, test: fractions of a site's samples held out from training.
        scored_on: the part that it is scored on.
        small_agents: how to treat a site with fewer training samples than a batch.
        eval_steps: fine-tuning steps at evaluation.
        personal_steps: fine-tuning steps of the personal model that a site keeps at the end.
        eval_lr: whether their step size is also chosen on validation samples, as configured.
        measure: what sites are scored by.
        rules: quorum, retries and checks of updates.
        threads: torch's threads at server and sites; bits depend on it.
        deadline: seconds until a site's complete reply must have arrived.
        wait: quorum timeout, in seconds: at the start for all sites, later for as many as a round
            needs; also the timeout of a new site's identification.
        like: an example sample that all sites' data must match; None: not checked.
        preparation: how the raw columns of sites' tables become inputs; None: they have none.
        privacy: clipping and noise applied at the sites; None: none.
        baselines: null baselines to evaluate at the end.
        tune_local: whether the step size of the baseline ``local`` is chosen on validation samples.
        site_keys: public keys of the sites, for secure aggregation; None: without it.
        method: name of the method, if the app has several; requests name it.
        augment: makes what changes the inputs of a site's training batches, for its samples.
        curvature: that step sizes come from, if it was measured; requests state it.
    """

    algorithm: Algorithm
    objective: Objective
    agents: int
    rounds: int
    participation: float = 1.0
    seed: int = 0
    unseen_agents: int | Sequence[str] = 0
    validation: float = 0.0
    test: float = 0.2
    scored_on: ScoredOn = "test"
    small_agents: SmallAgents = "refuse"
    eval_steps: int = 1
    personal_steps: int = 1
    eval_lr: EvalLr = "as_trained"
    measure: Measure = Measure("accuracy")
    rules: Rules = Rules()
    threads: int = 1
    deadline: float = 600.0
    wait: float = 60.0
    like: Samples | None = None
    preparation: Preparation | None = None
    privacy: Privacy | None = None
    baselines: tuple[str, ...] = ()
    tune_local: bool = False
    site_keys: SiteKeys | None = None
    method: str = ""
    augment: Callable[[Samples], Augmentation | None] | None = None
    curvature: float | None = None

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
        if self.site_keys is not None:
            self._check_secure(self.site_keys)
        if self.privacy is not None:  # the server sees the sum of so many noisy updates
            summed = threshold(self.cohort) if self.site_keys else 1
            object.__setattr__(self, "privacy", replace(self.privacy, summed=summed))

    @property
    def _sums_suffice(self) -> bool:
        """Whether the server needs only the means of updates, in all phases of training."""
        server = self.start()
        rounds = (1, max(1, self.rounds))
        return all(sums_suffice(self.algorithm, self.context(k), server) for k in rounds)

    def _check_private(self) -> None:
        """Refuse settings for which the stated epsilon does not hold."""
        for wrong, what in (
            *self._needs_single_updates("errors are no part of the noise"),
            (self.keeps_state, "an algorithm with agent states"),
        ):
            if wrong:
                raise InputError(
                    f"[privacy]: epsilon does not hold with {what}; remove that, or [privacy]"
                )
        if self.counted:
            raise InputError(
                'model.running_stats = "tracked" can\'t be combined with [privacy]: running '
                "statistics, which are no parameters, would be clipped with them, and noise makes "
                'variances negative; use a model with GroupNorm, or running_stats = "frozen"'
            )

    def _needs_single_updates(self, compressed: str) -> Sequence[tuple[bool, str]]:
        """Settings that need single updates, which privacy and secure aggregation hide, if set."""
        unknown = set(self.algorithm.sends) - set(self.algorithm.receives)
        return (
            (
                defines(self.algorithm, "downlink"),
                "an algorithm that sends an agent what it knows of single others",
            ),
            (not self._sums_suffice, "an aggregation other than the uniform mean"),
            (self.rules.max_update_norm is not None, "max_update_norm"),
            (self.rules.codec is not None, f"[compression], whose {compressed}"),
            (bool(unknown), "an algorithm that sends vectors it does not receive"),
        )

    def _check_secure(self, keys: SiteKeys) -> None:
        """Refuse settings that need single updates, which secure aggregation hides."""
        for wrong, what in (
            *self._needs_single_updates("codes can't be masked and added"),
            (self.cohort < MIN_SITES, f"cohorts of {self.cohort}, below {MIN_SITES} sites"),
            (
                len(keys.lines) != self.agents,
                f"{len(keys.lines)} keys in federation.site_keys for {self.agents} sites",
            ),
        ):
            if wrong:
                raise InputError(
                    f"federation.secure_aggregation hides single updates from the server and can't "
                    f"be combined with {what}; change that, or turn secure_aggregation off"
                )

    @cached_property
    def seen(self) -> Sequence[int]:
        """The agents that take part in training."""
        unseen = choose_unseen(self.agents, self.unseen_agents, self.seed)
        return [agent for agent in range(self.agents) if agent not in unseen]

    @property
    def cohort(self) -> int:
        """The number of agents picked per round."""
        return cohort_size(len(self.seen), self.participation)

    def context(self, round: int) -> Context:
        """The context of a round, known to server and sites."""
        cohort = self.cohort if round else 0
        return Context(round, len(self.seen), cohort, counted=self.counted, seed=self.seed)

    @cached_property
    def counted(self) -> Mapping[str, int]:
        """The number of parameters in vectors that end in running statistics, by name."""
        return counted_parameters(self.algorithm, self.objective, self.start())

    def update_bytes(self, server: State, round: int) -> int | None:
        """The bytes of a compressed update in a round; None: it is not compressed."""
        codec, sent = self.rules.codec, self.algorithm.sent_in(round)
        before = {name: server[name] for name in sent}
        return update_bytes(codec, before, self.counted) if codec else None

    @property
    def hides_single_numbers(self) -> bool:
        """Whether the server must not learn a number from one site's data."""
        return self.privacy is not None or self.site_keys is not None

    @property
    def sends_scores(self) -> bool:
        """Whether sites send their scores."""
        return self.privacy is None or self.privacy.scores

    @property
    def scores_by_class(self) -> bool:
        """Whether scores are also sent per class."""
        return self.measure.metric is accuracy and (self.like is None or bool(self.like.classes))

    def start(self) -> State:
        """The server's state before the first round."""
        return initial_server(self.algorithm, self.objective, self.objective.initial())

    @cached_property
    def keeps_state(self) -> bool:
        """Whether sites keep a state between rounds."""
        return bool(self.initial_state(self.received_like()))

    def initial_state(self, received: State) -> State:
        """A site's state before its first round; with error feedback also its residuals."""
        start = self.start()
        sent = {name: start[name] for name in self.algorithm.sends if name in start}
        state = self.algorithm.agent_init(self.objective, received)
        return {**state, **initial_residuals(self.rules.codec, sent)}

    def received_like(self) -> State:
        """Vectors with the names and shapes of those that a site receives."""
        return to_send(self.algorithm, self.start())

    @cached_property
    def reply_limit(self) -> ReplyLimit:
        """What a site's reply can have at most: the vectors that the algorithm sends, with 8 bytes
        per number (16 masked) and 1 KiB for each header, and 1 MiB beside the scores and the shares
        for other sites."""
        start = self.start()
        sent = [start[name] for name in self.algorithm.sends if name in start]
        size = 8 if self.site_keys is None else 16
        arrays = sum(size * vector.numel() + 2**10 for vector in sent)
        # of a score: loss, score, two accuracies, those on groups and resamples of samples, with
        # room for their encoding
        scores = MAX_SCALES * (self.eval_steps + 1) * 16 * (4 + GROUPS + RESAMPLES)
        shares = 0 if self.site_keys is None else 512 * self.cohort
        return ReplyLimit(arrays, 2**20 + scores + shares + arrays // 2**10)

    def scored_by(self, part: ScoredOn) -> Measure:
        """The measure on a part: with resamples on that of results, if sites are few."""
        return self.measure.resampled(self.agents) if part == self.scored_on else self.measure

    def _check_inputs(self, samples: Samples, like: Samples) -> None:
        given, wanted = (named_inputs(each.inputs) for each in (samples, like))
        if given.keys() != wanted.keys():
            raise InputError(
                f"this site's inputs are {_names(samples)}: federation.inputs says {_names(like)}"
            )
        for name, array in given.items():
            if array.shape[1:] != wanted[name].shape[1:]:
                raise InputError(
                    f"this site's inputs have shape {tuple(array.shape[1:])}: "
                    f"federation.input_shape is {list(wanted[name].shape[1:])}"
                )
            if array.dtype == torch.uint8:
                raise InputError(
                    "this site's inputs are uint8: convert them to floating point, for example "
                    "inputs / 255"
                )
            largest = wanted[name]  # of tokens
            if not largest.is_floating_point() and not _are_tokens(array, int(largest.max())):
                raise InputError(
                    "this site's inputs must be identifiers of tokens, whole numbers from 0 to "
                    f"{int(largest.max())}, as federation.vocabulary says"
                )

    def check_data(self, samples: Samples) -> None:
        """Refuse a site's data that does not match the federation's."""
        if self.like is None:
            return
        self._check_inputs(samples, self.like)
        if bool(samples.classes) != bool(self.like.classes):
            raise InputError(
                "this site's targets are "
                + (
                    "class numbers, but federation.classes is empty"
                    if samples.classes
                    else "not class numbers, but federation.classes is set"
                )
            )
        if samples.outputs > self.like.outputs or (
            not samples.classes and samples.outputs != self.like.outputs
        ):
            raise InputError(
                f"this site's targets need {samples.outputs} outputs: the federation has "
                f"{self.like.outputs}"
            )


def _names(samples: Samples) -> str:
    inputs = samples.inputs
    return ", ".join(map(shown, inputs)) if isinstance(inputs, Mapping) else "one array"


def _are_tokens(array: Tensor, largest: int) -> bool:
    whole = not array.is_floating_point()
    return whole and (not array.numel() or 0 <= int(array.min()) <= int(array.max()) <= largest)
