"""The server's requests for scores: of the model, of null baselines, and for personal models.

The null baselines are computed at the sites with the simulator's bits: ``untrained`` fine-tunes the
initial model, ``local`` trains at the site alone for as many steps as all rounds have. The majority
class comes with every evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from flwr.app import MessageType

from nufed.data import ScoredOn
from nufed.errors import UpdateError
from nufed.evaluate import (
    AgentScores,
    Evaluation,
    choose_step_sizes,
    chooses,
    evaluate_with_choice,
    preferred,
)
from nufed.flower.app.events import LeftOut, Recording
from nufed.flower.app.payload import (
    BASELINE,
    KEEP,
    LOCAL,
    OFFLINE,
    UNTRAINED,
    ExpectedScores,
    NoReply,
    PayloadError,
    read_scores,
    usable,
)
from nufed.flower.app.plan import Plan
from nufed.flower.app.transport import Transport
from nufed.flower.logs import LOG
from nufed.server import Progress, to_send


@dataclass(frozen=True)
class Outcome:
    """Every site's scores of a model; ``missing`` are the sites without usable scores, and why.

    ``majority`` are the scores of always predicting a site's most frequent class (classification).
    """

    evaluation: Evaluation
    missing: tuple[UpdateError, ...] = ()
    majority: tuple[AgentScores, ...] = ()

    @property
    def scores(self) -> list[AgentScores]:
        """With the step size of fine-tuning as trained."""
        return self.evaluation.as_trained


class Scoring:
    """Asks sites to evaluate."""

    def __init__(self, plan: Plan, transport: Transport, record: Recording) -> None:
        self._plan, self._transport, self._record = plan, transport, record
        self._roster = transport.roster

    def evaluate(self, progress: Progress, choose: bool = False) -> Outcome:
        """Every site's scores after personalising the server's model, each on its own data.

        With ``choose`` also with the fine-tuning step sizes chosen on the validation samples of
        seen agents. No requests are sent if the plan keeps scores at the sites.
        """
        plan = self._plan
        if not plan.sends_scores:
            return Outcome(Evaluation([]))
        missing: list[UpdateError] = []
        majority: list[AgentScores] = []

        def score(scales: Sequence[float]) -> list[list[AgentScores]]:
            scores, unscored, nulls = self._scores(
                progress, range(plan.agents), scales, plan.scored_on, diverged=False
            )
            missing.extend(unscored)
            majority.extend(nulls)
            return scores

        def validate(scales: Sequence[float]) -> list[list[AgentScores]]:
            # candidates include step sizes that diverge
            return self._scores(progress, plan.seen, scales, "validation", diverged=True)[0]

        possible = choose and plan.validation > 0
        evaluation = evaluate_with_choice(
            score,
            validate if possible else None,
            plan.eval_steps,
            plan.measure,
            preferred(plan.algorithm),
        )
        return Outcome(evaluation, tuple(missing), tuple(majority))

    def baselines(self, progress: Progress, agents: Sequence[int]) -> dict[str, Evaluation]:
        """The null baselines that these agents' sites compute, without those that any lacks."""

        def ask(name: str, scales: Sequence[float], part: ScoredOn) -> list[list[AgentScores]]:
            asked = [each for each in agents if part != "validation" or each in self._plan.seen]
            return self._scores(progress, asked, scales, part, diverged=True, baseline=name)[0]

        complete = {}
        for name, evaluation in _baselines(self._plan, ask):
            if [scores.agent for scores in evaluation.as_trained] == list(agents):
                complete[name] = evaluation
            else:
                LOG.warning("the baseline %s is left out: not all sites sent its scores", name)
        return complete

    def keep_personal_models(self, progress: Progress, scale: float = 1.0) -> None:
        """Have every site write its personal model, as results show it; sites send nothing back.

        ``scale`` multiplies the step size of fine-tuning.
        """
        kind, agents = f"{MessageType.EVALUATE}.{KEEP}", range(self._plan.agents)
        replies, _ = self._transport.ask(
            kind,
            progress.round,
            agents,
            to_send(self._plan.algorithm, progress.server),
            scales=[scale],
        )
        for agent, reply in replies.items():
            if isinstance(reply, NoReply):
                who = self._roster.label(agent)
                LOG.warning("%s did not confirm its personal model: %s", who, reply.reason)

    def _scores(
        self,
        progress: Progress,
        agents: Iterable[int],
        scales: Sequence[float],
        part: ScoredOn,
        diverged: bool,
        baseline: str = "",
    ) -> tuple[list[list[AgentScores]], list[UpdateError], list[AgentScores]]:
        """These agents' scores by scale, agents without any and why, and majority-class scores.

        With ``baseline`` they are those of a null baseline. Local training takes as long as all
        rounds, and so does its deadline.
        """
        plan, k = self._plan, progress.round
        kind, deadline = MessageType.EVALUATE, plan.deadline
        sent = to_send(plan.algorithm, progress.server)
        has_global = plan.algorithm.global_model(plan.objective, sent) is not None
        options: dict[str, Any] = {"scales": list(scales), "part": part}
        if baseline:
            kind, has_global = f"{kind}.{BASELINE}", baseline == UNTRAINED
            options["baseline"] = baseline
            if baseline == LOCAL:
                deadline += len(scales) * plan.rounds * self._transport.longest
        replies, offline = self._transport.ask(kind, k, agents, sent, deadline=deadline, **options)
        who = self._roster.label
        missing = [OFFLINE.error(agent, k, who(agent)) for agent in offline]
        scores: list[list[AgentScores]] = [[] for _ in scales]
        majority: list[AgentScores] = []
        for agent, reply in replies.items():
            try:
                expected = ExpectedScores(
                    agent=agent,
                    name=self._roster.names[agent],
                    seen=agent in plan.seen,
                    round=k,
                    steps=plan.eval_steps,
                    scales=len(scales),
                    by_class=plan.scores_by_class,
                    has_global=has_global,
                    diverged=diverged,
                )
                by_scale, null = read_scores(usable(reply), expected)
            except PayloadError as error:
                missing.append(UpdateError(agent, k, str(error), error.fault, who(agent)))
                continue
            for of_scale, each in zip(scores, by_scale, strict=True):
                of_scale.append(each)
            majority += [null] if null else []
        for left_out in missing:
            LOG.warning("scores left out: %s", left_out)
        self._record(LeftOut("scores", k, missing))
        return scores, missing, majority


Ask: TypeAlias = Callable[[str, Sequence[float], ScoredOn], list[list[AgentScores]]]
"""Asks sites for the scores of a baseline, by scale of its step size, on a part of the samples."""


def _baselines(plan: Plan, ask: Ask) -> Iterator[tuple[str, Evaluation]]:
    """The baselines of a plan, as far as sites send scores."""
    possible = plan.validation > 0
    if UNTRAINED in plan.baselines:
        validate = possible and chooses(plan.eval_lr, True)
        yield (
            UNTRAINED,
            evaluate_with_choice(
                lambda scales: ask(UNTRAINED, scales, plan.scored_on),
                (lambda scales: ask(UNTRAINED, scales, "validation")) if validate else None,
                plan.eval_steps,
                plan.measure,
                "smallest",
            ),
        )
    if LOCAL in plan.baselines:
        sizes = None
        if plan.tune_local and possible:
            sizes = choose_step_sizes(
                lambda scales: ask(LOCAL, scales, "validation"), [0], plan.measure, "best"
            )
        (scores,) = ask(LOCAL, [sizes.scale(0) if sizes else 1.0], plan.scored_on)
        yield LOCAL, Evaluation(scores, step_sizes=sizes)
