"""The server's half: rounds over sites, with the simulator's cohorts, checks and aggregation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from flwr.app import ConfigRecord, MessageType, RecordDict
from flwr.serverapp import Grid
from pydantic import Field, TypeAdapter, ValidationError

from nufed.algorithms.protocol import AgentUpdate, Cost, State, SummedUpdates
from nufed.errors import RunError, UpdateError, shown
from nufed.flower.app.events import Aggregated, EventLog, LeftOut, RoundTrained, TrainingStarted
from nufed.flower.app.payload import LOOK, NoReply, PayloadError, read_look, read_update, usable
from nufed.flower.app.plan import Plan
from nufed.flower.app.privacy import Account, implausible
from nufed.flower.app.registry import Authentication
from nufed.flower.app.roster import Exclusions, Roster
from nufed.flower.app.scoring import Scoring
from nufed.flower.app.transport import Transport
from nufed.flower.logs import LOG
from nufed.flower.secure_sum.messages import MASKED, SECURE
from nufed.flower.secure_sum.server import Replies, SecureRound, new_attempt
from nufed.flower.secure_sum.terms import SecureSumError, SumTerms
from nufed.server import (
    Attempts,
    Downlink,
    Incoming,
    Progress,
    QuorumError,
    choose_cohort,
    close_round,
    open_round,
    replaced,
    to_send,
    update_norm,
)


@dataclass(frozen=True)
class Cohorts:
    """How cohorts are drawn.

    Args:
        seed: if it must differ from the plan's, which is public.
        sums: cohorts of the secure sums of other methods of the run, and the sites in them, by
            round; sites unmask a sum of this method only over the same.
    """

    seed: int | None = None
    sums: Mapping[int, tuple[list[int], list[int]]] = field(default_factory=dict)


class Server:
    """Runs a plan over the sites that a Grid reaches.

    Args:
        plan: what is trained.
        grid: reaches the sites.
        run: the run's id, 32 hexadecimal digits; sites store their states under it.
        notes: :attr:`notes` from the checkpoint that training resumes from.
        cohorts: how they are drawn; by default from the plan's seed.
        sites: the registry of sites, whose keys must sign all replies; None: no signatures.
        exclusions: agents that are not sent requests; those found to need it are added.
        events: records what happens.

    ``account`` is the privacy account, if the plan has privacy; ``scoring`` asks for scores.
    """

    def __init__(
        self,
        plan: Plan,
        grid: Grid,
        run: str,
        notes: Mapping[str, Any] | None = None,
        cohorts: Cohorts | None = None,
        sites: Path | None = None,
        exclusions: Exclusions | None = None,
        events: EventLog | None = None,
    ) -> None:
        self._plan, self._run, self._cohorts = plan, run, cohorts or Cohorts()
        self._exclusions = exclusions or Exclusions()
        self._record = (events or EventLog(plan)).record
        self._roster = Roster(grid, plan, Authentication(sites), self._record)
        who = self._roster.label
        ledger = None if notes is None else notes.get("ledger", "missing")
        self.account = (
            Account(plan.privacy, len(plan.seen), plan.cohort, ledger, who)
            if plan.privacy
            else None
        )
        # the last round in which an agent's update was accepted
        self._taken = read_taken((notes or {}).get("taken", {}))
        self._transport = Transport(
            *(grid, plan, run, self._roster),
            self._exclusions,
            self.account,
            self._taken,
            self._record,
        )
        self.scoring = Scoring(plan, self._transport, self._record)
        self._warnings: list[tuple[int, str]] = []

    @property
    def names(self) -> dict[int, str]:
        """The names of the sites that are registered or were connected."""
        return dict(self._roster.names)

    @property
    def notes(self) -> dict[str, Any]:
        """What a checkpoint must hold in addition to the progress, as plain JSON."""
        taken = {str(agent): round for agent, round in sorted(self._taken.items())}
        return {"taken": taken, **({"ledger": self.account.as_json()} if self.account else {})}

    def new_warnings(self) -> list[tuple[int, str]]:
        """Rounds and why their numbers may be wrong: those since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def look(self) -> float | None:
        """The largest curvature of first gradients at the sites of the first round's cohort.

        None if no site measures any.
        """
        plan, measured = self._plan, list[float]()
        self._roster.gather()
        cohort = choose_cohort(plan.seen, plan.participation, plan.seed, 1)
        kind, sent = f"{MessageType.EVALUATE}.{LOOK}", to_send(plan.algorithm, plan.start())
        replies, _ = self._transport.ask(kind, 0, cohort, sent)
        for agent, reply in replies.items():
            try:
                measured.append(read_look(usable(reply), agent))
            except PayloadError as error:
                LOG.warning("%s measured no curvature: %s", self._roster.label(agent), error)
        return max(measured, default=None)

    def train(self, start: Progress | None = None) -> Iterator[Progress]:
        """The training state at the start and after every round."""
        plan, seed = self._plan, self._cohorts.seed
        self._roster.gather()
        progress = start or Progress(0, plan.start())
        self._record(TrainingStarted(progress))
        yield progress
        while progress.round < plan.rounds:
            attempts = Attempts(
                progress.round + 1,
                plan.seen,
                participation=plan.participation,
                seed=plan.seed if seed is None else seed,
                rules=plan.rules,
            )
            for cohort, _ in attempts:
                with attempts.quorum():
                    try:
                        collected = self._collect(progress, cohort)
                        progress = attempts.accepted(self._close(progress, collected))
                        break
                    except QuorumError as error:
                        self._leave_out(progress.round + 1, error.rejected)
                        raise
            self._record(RoundTrained(progress))
            yield progress

    def _collect(self, before: Progress, cohort: list[int]) -> Collected:
        """The updates of an attempt at a round, each checked as it arrives."""
        plan, k = self._plan, before.round + 1
        cohort = self._cohorts.sums[k][0] if k in self._cohorts.sums else cohort
        if self.account:
            self.account.check_next()
        included = [agent for agent in cohort if not self._exclusions.reason(agent)]
        self._roster.wait_for(included, min(plan.rules.min_updates, len(included)))
        if plan.site_keys:
            return self._collect_sum(before, cohort)
        incoming = open_round(plan.algorithm, before, plan.context(k), cohort, plan.rules)
        collected = Collected(cohort, incoming)
        expected = {name: before.server[name] for name in plan.algorithm.sent_in(k)}
        sent = to_send(plan.algorithm, before.server, plan.context(k))

        def keep(agent: int, reply: RecordDict) -> RecordDict:
            """Pass on the update of a reply as it arrives; nothing else of it is kept."""
            try:
                update, spent, began = self._read(
                    agent,
                    reply,
                    replaced(Downlink.of(sent).to(agent), expected)
                    if plan.rules.codec
                    else expected,
                )
                incoming.add(update)
                collected.began[agent] = began
                collected.cost += spent
            except PayloadError as error:
                collected.failed.append(UpdateError(agent, k, str(error), error.fault))
            return RecordDict()

        kind = MessageType.TRAIN
        replies, collected.dropped = self._transport.ask(kind, k, cohort, sent, keep=keep)
        collected.failed += [
            reply.error(agent, k) for agent, reply in replies.items() if isinstance(reply, NoReply)
        ]
        collected.failed.sort(key=lambda error: error.agent)
        collected.began = dict(sorted(collected.began.items()))
        return collected

    def _read(
        self, agent: int, records: Mapping[str, object], expected: State
    ) -> tuple[AgentUpdate, Cost, int]:
        """The update in a reply, its cost and its state's round; a noisy one is charged."""
        plan = self._plan
        if self.account:
            records = self.account.charge(agent, records)
        update, spent, began = read_update(records, agent, expected, plan.rules.codec, plan.counted)
        wrong = plan.privacy and implausible(update.vectors, expected, plan.privacy)
        if wrong:
            raise PayloadError(wrong)
        return update, spent, began

    def _collect_sum(self, before: Progress, cohort: list[int]) -> Collected:
        """The means of a round's updates, by secure aggregation."""
        plan, server, k = self._plan, before.server, before.round + 1
        _, summed = self._cohorts.sums.get(k, (cohort, cohort))

        sent = to_send(plan.algorithm, server, plan.context(k))

        def send(kind: str, sites: Iterable[int], make: Callable[[int], ConfigRecord]) -> Replies:
            vectors, asked = sent if kind.endswith(MASKED) else None, set(sites)
            replies, offline = self._transport.ask(
                kind, k, sorted(asked & {*summed}), vectors, records=lambda s: {SECURE: make(s)}
            )
            return replies, [*offline, *sorted(asked - {*summed})]

        terms = SumTerms(self._run, k, new_attempt(), tuple(cohort))
        expected = {name: server[name] for name in plan.algorithm.sent_in(k)}
        charge = self.account.charge if self.account else None
        attempt = SecureRound(terms, expected, send, charge, self._roster.label)
        try:
            updates = attempt.run()
        except SecureSumError as error:
            LOG.warning("round %d has no secure sum: %s", k, error)
            raise QuorumError(k, attempt.failed, plan.rules) from None
        of = attempt.dropped, attempt.failed, attempt.began, attempt.cost
        return Collected(cohort, updates, *of)

    def _close(self, before: Progress, collected: Collected) -> Progress:
        """The training state after an attempt that reaches the quorum."""
        plan, k = self._plan, before.round + 1
        server, rejected = close_round(
            plan.algorithm,
            before.server,
            collected.updates,
            plan.context(k),
            failed=collected.failed,
            rules=plan.rules,
            who=self._roster.label,
        )
        left_out = {error.agent for error in rejected}
        taken = [agent for agent in collected.began if agent not in left_out]
        self._leave_out(k, rejected)
        self._record(Aggregated(k, taken))
        if self.account:
            self.account.close(len(taken))
        if plan.keeps_state:
            began = {agent: collected.began[agent] for agent in sorted(taken)}
            self._name_restarted(k, [a for a, b in began.items() if b != self._taken.get(a, 0)])
            self._taken |= dict.fromkeys(taken, k)
        incoming = collected.updates
        return Progress(
            round=k,
            server=server,
            cohort=tuple(collected.cohort),
            rejected=tuple(rejected),
            dropped=tuple(collected.dropped),
            taken=tuple(taken),
            cost=collected.cost,
            update_norm=update_norm(plan.algorithm, before.server, server, plan.context(k)),
            medians=incoming.medians if isinstance(incoming, Incoming) else {},
            update_bytes=plan.update_bytes(before.server, k),
        )

    def _name_restarted(self, round: int, agents: Iterable[int]) -> None:
        for agent in agents:
            lost = self._plan.algorithm.notes.lost_state
            who = self._roster.label(agent)
            message = f"{who} lost its state and restarted from the initial one: {lost}"
            LOG.warning("round %d: %s", round, message)
            self._warnings.append((round, message))

    def _leave_out(self, round: int, errors: Iterable[UpdateError]) -> None:
        self._record(LeftOut("updates", round, tuple(errors)))


@dataclass
class Collected:
    """The replies of a round; ``began``: the round of the state that each agent started from."""

    cohort: list[int]
    updates: SummedUpdates | Incoming
    dropped: list[int] = field(default_factory=list)
    failed: list[UpdateError] = field(default_factory=list)
    began: dict[int, int] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)


def read_taken(record: object) -> dict[int, int]:
    """Each agent's last accepted round, from the notes of a checkpoint."""
    try:
        return TypeAdapter(dict[int, Annotated[int, Field(strict=True, ge=0)]]).validate_python(
            record
        )
    except ValidationError:
        raise RunError(f"the checkpoint's notes are invalid: taken = {shown(record)}") from None
