"""The server's half: rounds over sites, with the simulator's cohorts, checks and aggregation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, MessageType, RecordDict
from flwr.serverapp import Grid

from nufed.algorithms.protocol import State
from nufed.data import ScoredOn
from nufed.errors import UpdateError
from nufed.evaluate import AgentScores, Evaluation, evaluate_with_choice
from nufed.flower.app.authentication import Authentication
from nufed.flower.app.collected import Collected, Collector, read_taken, usable
from nufed.flower.app.exchange import Exchange
from nufed.flower.app.exclusions import Exclusions
from nufed.flower.app.messaging import LOG, Roster
from nufed.flower.app.monitor import OFFLINE, Monitor
from nufed.flower.app.outcome import Outcome
from nufed.flower.app.payload import ARRAYS, BASELINE, KEEP, PayloadError, content, to_arrays
from nufed.flower.app.plan import Plan
from nufed.flower.app.privacy_account import Account
from nufed.flower.app.refusals import site_label
from nufed.flower.app.score_payload import read_scores
from nufed.flower.app.secure_payload import MASKED, SECURE, TRAINS
from nufed.flower.app.secure_round import Replies, collect_sum, new_attempt
from nufed.flower.app.secure_sum.sum_terms import SumTerms
from nufed.flower.app.site_baselines import LOCAL, UNTRAINED, baselines
from nufed.runs.audit_log import Audit, not_audited
from nufed.server import (
    Attempts,
    Incoming,
    Progress,
    QuorumError,
    close_round,
    open_round,
    to_send,
    update_norm,
)


class Server:
    """Runs a plan over the sites that a Grid reaches.

    Args:
        plan: what is trained.
        grid: reaches the sites.
        run: the run's id, 32 hexadecimal digits; sites store their states under it.
        notes: :attr:`notes` from the checkpoint that training resumes from.
        cohort_seed: the seed of cohorts, if it must differ from the plan's, which is public.
        on_doubt: called with a round and why its numbers may be wrong.
        sites: the registry of sites, whose keys must sign all replies; None: no signatures.
        audit: writes an event to the audit log.
        exclusions: agents that are not sent requests; those found to need it are added.
        monitor: records what the server sees of its sites.

    ``account`` is the privacy account, if the plan has privacy.
    """

    def __init__(
        self,
        plan: Plan,
        grid: Grid,
        run: str,
        notes: Mapping[str, Any] | None = None,
        cohort_seed: int | None = None,
        on_doubt: Callable[[int, str], None] | None = None,
        sites: Path | None = None,
        audit: Audit = not_audited,
        exclusions: Exclusions | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self._on_doubt, self._audit = on_doubt, audit
        self._plan, self._run = plan, run
        self._cohort_seed = plan.seed if cohort_seed is None else cohort_seed
        self._exclusions = exclusions or Exclusions()
        self._roster = Roster(grid, plan, Authentication(sites), audit)
        self._monitor = monitor or Monitor(plan)
        self._exchange = Exchange(grid, plan, self._roster, self._exclusions, self._monitor, audit)
        ledger = None if notes is None else notes.get("ledger", "missing")
        self.account = (
            Account(plan.privacy, len(plan.seen), plan.cohort, ledger) if plan.privacy else None
        )
        # the last round in which an agent's update was accepted
        self._taken = read_taken((notes or {}).get("taken", {}))

    @property
    def names(self) -> dict[int, str]:
        """The names of the sites that were connected."""
        return dict(self._roster.names)

    @property
    def notes(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the progress, as plain JSON."""
        taken = {str(agent): round for agent, round in sorted(self._taken.items())}
        return {"taken": taken, **({"ledger": self.account.as_json()} if self.account else {})}

    def train(self, start: Progress | None = None) -> Iterator[Progress]:
        """The training state at the start and after every round."""
        plan = self._plan
        self._roster.gather()
        progress = start or Progress(0, plan.start())
        self._monitor.begins(progress)
        yield progress
        while progress.round < plan.rounds:
            attempts = Attempts(
                progress.round + 1,
                plan.seen,
                participation=plan.participation,
                seed=self._cohort_seed,
                rules=plan.rules,
            )
            for cohort, _ in attempts:
                with attempts.quorum():
                    progress = attempts.accepted(self._attempt(progress, cohort))
                    break
            self._monitor.closes(progress)
            yield progress

    def _attempt(self, before: Progress, cohort: list[int]) -> Progress:
        plan, k = self._plan, before.round + 1
        if self.account:
            self.account.check_next()
        included = [agent for agent in cohort if not self._exclusions.reason(agent)]
        self._roster.wait_for(included, min(plan.rules.min_updates, len(included)))
        try:
            found = (self._sum if plan.site_keys else self._updates)(before, k, cohort)
            server, rejected = close_round(
                plan.algorithm,
                before.server,
                found.updates,
                plan.context(k),
                failed=found.failed,
                rules=plan.rules,
            )
        except QuorumError as error:
            self._audit_left_out("updates", k, error.rejected)
            raise
        left_out = {error.agent for error in rejected}
        taken = [agent for agent in found.began if agent not in left_out]
        self._audit_left_out("updates", k, rejected)
        self._audit("aggregated", round=k, sites=taken)
        if self.account:
            self.account.close(len(taken))
        if plan.keeps_state:
            began = {agent: found.began[agent] for agent in sorted(taken)}
            self._name_restarted(k, [a for a, b in began.items() if b != self._taken.get(a, 0)])
            self._taken |= dict.fromkeys(taken, k)
        return Progress(
            round=k,
            server=server,
            cohort=tuple(cohort),
            rejected=tuple(rejected),
            dropped=tuple(found.dropped),
            taken=tuple(taken),
            cost=found.cost,
            update_norm=update_norm(plan.algorithm, before.server, server),
            medians=found.updates.medians if isinstance(found.updates, Incoming) else {},
            update_bytes=plan.update_bytes(before.server, k),
        )

    def _name_restarted(self, round: int, agents: Iterable[int]) -> None:
        for agent in agents:
            lost = self._plan.algorithm.lost_state
            who = site_label(agent, self._roster.names)
            message = f"{who} lost its state and restarted from the initial one: {lost}"
            LOG.warning("round %d: %s", round, message)
            if self._on_doubt:
                self._on_doubt(round, message)

    def _updates(self, before: Progress, round: int, cohort: list[int]) -> Collected:
        """The updates of a round, each checked as it arrives."""
        plan, server = self._plan, before.server
        incoming = open_round(plan.algorithm, before, plan.context(round), cohort, plan.rules)
        collector = Collector(plan, server, round, incoming, self.account)
        kind = MessageType.TRAIN
        return collector.close(*self._request(kind, server, round, cohort, keep=collector.take))

    def _sum(self, before: Progress, round: int, cohort: list[int]) -> Collected:
        """The means of a round's updates, by secure aggregation."""
        server = before.server

        def send(kind: str, sites: Iterable[int], make: Callable[[int], ConfigRecord]) -> Replies:
            vectors = server if kind.endswith(MASKED) else None
            return self._request(kind, vectors, round, sites, lambda site: {SECURE: make(site)})

        terms = SumTerms(self._run, round, new_attempt(), tuple(cohort))
        return collect_sum(self._plan, terms, server, send, self.account)

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
            score, validate if possible else None, plan.eval_steps, plan.measure
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
            if isinstance(reply, str):
                who = site_label(agent, self._roster.names)
                LOG.warning("%s did not confirm its personal model: %s", who, reply)

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
        missing = [UpdateError(agent, k, OFFLINE) for agent in offline]
        scores: list[list[AgentScores]] = [[] for _ in scales]
        majority: list[AgentScores] = []
        for agent, reply in replies.items():
            try:
                own, null = read_scores(
                    usable(reply),
                    agent,
                    k,
                    name=self._roster.names[agent],
                    seen=agent in plan.seen,
                    steps=plan.eval_steps,
                    scales=len(scales),
                    by_class=plan.scores_by_class,
                    has_global=has_global,
                    diverged=diverged,
                )
            except PayloadError as reason:
                missing.append(UpdateError(agent, k, str(reason)))
                continue
            for by_scale, each in zip(scores, own, strict=True):
                by_scale.append(each)
            majority += [null] if null else []
        for error in missing:
            LOG.warning("scores left out: %s", error)
        self._audit_left_out("scores", k, missing)
        self._monitor.leaves_out(missing)
        return scores, missing, majority

    def _request(
        self,
        kind: str,
        server: State | None,
        round: int,
        agents: Iterable[int],
        records: Callable[[int], Mapping[str, ConfigRecord]] = lambda agent: {},
        deadline: float | None = None,
        keep: Callable[[int, RecordDict], RecordDict] = lambda agent, reply: reply,
        **more: Any,
    ) -> Replies:
        """The replies of these agents, in their order, and the agents whose site is offline.

        Instead of a reply, the reason why there is none; excluded agents are sent no request.
        Without ``server`` no vectors are sent; ``records`` are further ones for each agent;
        ``keep`` returns what is kept of a reply, when it arrives.
        """
        agents = list(agents)
        self._roster.refresh()
        excluded = {agent: why for agent in agents if (why := self._exclusions.reason(agent))}
        nodes = {agent: self._roster.nodes.get(agent) for agent in agents if agent not in excluded}
        offline = [agent for agent, node in nodes.items() if node is None]
        if offline:
            LOG.warning("round %d: the sites of agents %s are offline", round, offline)
        sent = None if server is None else to_send(self._plan.algorithm, server)
        arrays = {} if sent is None else {ARRAYS: to_arrays(sent)}  # one copy for all sites
        contents = {}
        for agent in (each for each in nodes if each not in offline):
            contents[agent] = content(
                run=self._run,
                agent=agent,
                round=round,
                taken=self._taken.get(agent, 0),
                released=self.account.released_by(agent) if self.account else 0,
                **more,
            )
            contents[agent].update({**arrays, **records(agent)})
        if self.account and kind in TRAINS:
            self.account.requested(contents)
        seconds = deadline or self._plan.deadline
        replies = self._exchange.ask(kind, round, sent, contents, seconds, keep) | excluded
        return {agent: replies[agent] for agent in agents if agent in replies}, offline

    def _audit_left_out(self, what: str, round: int, errors: Sequence[UpdateError]) -> None:
        if errors:
            reasons = {str(error.agent): error.reason for error in errors}
            self._audit("left out", what=what, round=round, sites=reasons)
