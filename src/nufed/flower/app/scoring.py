"""The server's requests for scores: of the model, of null baselines, and for personal models.

The result of an evaluation at the sites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import MessageType

from nufed.data import ScoredOn
from nufed.errors import Fault, UpdateError
from nufed.evaluate import AgentScores, Evaluation, evaluate_with_choice, preferred
from nufed.flower.app.exchange import Exchange
from nufed.flower.app.messaging import LOG
from nufed.flower.app.monitor import OFFLINE
from nufed.flower.app.payload import (
    BASELINE,
    KEEP,
    ExpectedScores,
    NoReply,
    PayloadError,
    read_scores,
    usable,
)
from nufed.flower.app.plan import Plan
from nufed.flower.app.roster import Roster
from nufed.flower.app.site_baselines import LOCAL, UNTRAINED, baselines
from nufed.flower.secure_sum.server import Replies
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
    """Asks sites to evaluate.

    Args:
        plan: what is trained.
        request: :meth:`nufed.flower.app.server_app.Server.request`.
        roster: names the sites of agents.
        exchange: knows how long training takes.
        leave_out: records whose scores of a round are left out.
    """

    def __init__(
        self,
        plan: Plan,
        request: Callable[..., Replies],
        roster: Roster,
        exchange: Exchange,
        leave_out: Callable[[int, Sequence[UpdateError]], None],
    ) -> None:
        self._plan, self._request, self._roster = plan, request, roster
        self._exchange, self._leave_out = exchange, leave_out

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

        return baselines(self._plan, ask, agents)

    def keep_personal_models(self, progress: Progress, scale: float = 1.0) -> None:
        """Have every site write its personal model, as results show it; sites send nothing back.

        ``scale`` multiplies the step size of fine-tuning.
        """
        kind, agents = f"{MessageType.EVALUATE}.{KEEP}", range(self._plan.agents)
        replies, _ = self._request(kind, progress.server, progress.round, agents, scales=[scale])
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
                deadline += len(scales) * plan.rounds * self._exchange.longest
        replies, offline = self._request(
            kind, progress.server, k, agents, deadline=deadline, **options
        )
        who = self._roster.label
        missing = [UpdateError(a, k, OFFLINE, Fault.OFFLINE, who(a)) for a in offline]
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
                own, null = read_scores(usable(reply), expected)
            except PayloadError as error:
                missing.append(UpdateError(agent, k, str(error), error.fault, who(agent)))
                continue
            for by_scale, each in zip(scores, own, strict=True):
                by_scale.append(each)
            majority += [null] if null else []
        for left_out in missing:
            LOG.warning("scores left out: %s", left_out)
        self._leave_out(k, missing)
        return scores, missing, majority
