"""The server's half: rounds over sites, with the simulator's cohorts, checks and aggregation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flwr.app import ConfigRecord, MessageType, RecordDict
from flwr.serverapp import Grid

from nufed.algorithms.protocol import State
from nufed.errors import UpdateError
from nufed.flower.app.collected import Collected, Collector, read_taken
from nufed.flower.app.exchange import Exchange
from nufed.flower.app.exclusions import Exclusions
from nufed.flower.app.messaging import LOG
from nufed.flower.app.monitor import Monitor
from nufed.flower.app.payload import ARRAYS, NoReply, content, method_record, to_arrays
from nufed.flower.app.plan import Plan
from nufed.flower.app.privacy import Account
from nufed.flower.app.registry import Authentication
from nufed.flower.app.roster import Roster
from nufed.flower.app.scoring import Scoring
from nufed.flower.secure_sum.messages import MASKED, SECURE, TRAINS
from nufed.flower.secure_sum.server import Replies, collect_sum, new_attempt
from nufed.flower.secure_sum.terms import SumTerms
from nufed.lab.runs.audit_log import Audit, not_audited
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
        sums: cohorts of the secure sums of other methods of the run, and the sites in them, by
            round; sites unmask a sum of this method only over the same.

    ``account`` is the privacy account, if the plan has privacy; ``scoring`` asks for scores.
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
        sums: Mapping[int, tuple[list[int], list[int]]] = MappingProxyType({}),
    ) -> None:
        self._on_doubt, self._audit = on_doubt, audit
        self._plan, self._run, self._sums = plan, run, sums
        self._cohort_seed = plan.seed if cohort_seed is None else cohort_seed
        self._exclusions = exclusions or Exclusions()
        self._roster = Roster(grid, plan, Authentication(sites), audit)
        self._monitor = monitor or Monitor(plan)
        self._exchange = Exchange(grid, plan, self._roster, self._exclusions, self._monitor, audit)
        ledger = None if notes is None else notes.get("ledger", "missing")
        self.account = (
            Account(plan.privacy, len(plan.seen), plan.cohort, ledger, self._roster.label)
            if plan.privacy
            else None
        )
        # the last round in which an agent's update was accepted
        self._taken = read_taken((notes or {}).get("taken", {}))
        self.scoring = Scoring(
            plan, self.request, self._roster, self._exchange, self._leave_out_scores
        )

    @property
    def names(self) -> dict[int, str]:
        """The names of the sites that are registered or were connected."""
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
        cohort = self._sums[k][0] if k in self._sums else cohort
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
                who=self._roster.label,
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
            update_norm=update_norm(plan.algorithm, before.server, server, plan.context(k)),
            medians=found.updates.medians if isinstance(found.updates, Incoming) else {},
            update_bytes=plan.update_bytes(before.server, k),
        )

    def _name_restarted(self, round: int, agents: Iterable[int]) -> None:
        for agent in agents:
            lost = self._plan.algorithm.lost_state
            who = self._roster.label(agent)
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
        return collector.close(*self.request(kind, server, round, cohort, keep=collector.take))

    def _sum(self, before: Progress, round: int, cohort: list[int]) -> Collected:
        """The means of a round's updates, by secure aggregation."""
        server = before.server
        _, summed = self._sums.get(round, (cohort, cohort))

        def send(kind: str, sites: Iterable[int], make: Callable[[int], ConfigRecord]) -> Replies:
            vectors, asked = server if kind.endswith(MASKED) else None, set(sites)
            replies, offline = self.request(
                kind, vectors, round, sorted(asked & {*summed}), lambda s: {SECURE: make(s)}
            )
            return replies, [*offline, *sorted(asked - {*summed})]

        terms = SumTerms(self._run, round, new_attempt(), tuple(cohort))
        return collect_sum(self._plan, terms, server, send, self.account, self._roster.label)

    def request(
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
        excluded = {a: NoReply(why) for a in agents if (why := self._exclusions.reason(a))}
        nodes = {agent: self._roster.nodes.get(agent) for agent in agents if agent not in excluded}
        offline = [agent for agent, node in nodes.items() if node is None]
        if offline:
            LOG.warning("round %d: offline: %s", round, self._roster.labels(offline))
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
            contents[agent].update({**arrays, **records(agent), **method_record(self._plan.method)})
        if self.account and kind in TRAINS:
            self.account.requested(contents)
        seconds = deadline or self._plan.deadline
        replies = self._exchange.ask(kind, round, sent, contents, seconds, keep) | excluded
        return {agent: replies[agent] for agent in agents if agent in replies}, offline

    def _leave_out_scores(self, round: int, errors: Sequence[UpdateError]) -> None:
        self._audit_left_out("scores", round, errors)
        self._monitor.leaves_out(errors)

    def _audit_left_out(self, what: str, round: int, errors: Sequence[UpdateError]) -> None:
        if errors:
            reasons = {str(error.agent): error.reason for error in errors}
            self._audit("left out", what=what, round=round, sites=reasons)
