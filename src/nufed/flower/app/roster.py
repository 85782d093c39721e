"""The sites that take part in a run: which of Flower's nodes is which agent's, and who is excluded.

Agents that are excluded from the rest of a run are kept in a sealed file of the run directory. It
is written as soon as an agent is excluded, not with the next checkpoint: a run that is killed or
fails in the same round does not send it another request when it is resumed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from nufed.errors import TrainingError
from nufed.flower.app.events import Excluded, Joined, Left, Recording, SitesSeen
from nufed.flower.app.payload import (
    VERSION,
    NoReply,
    PayloadError,
    Reply,
    content,
    read_identity,
    usable,
)
from nufed.flower.app.plan import Plan
from nufed.flower.app.registry import Authentication
from nufed.flower.app.replies import POLL_INTERVAL, Pending
from nufed.flower.logs import LOG
from nufed.lab.files import read_sealed, write_sealed
from nufed.lab.runs.federation_records import ExclusionsRecord, RoundReason
from nufed.lab.runs.json_files import checked

EXCLUDED = "excluded.json"
LISTED = 10  # sites named for each reason
QUERY_TTL = 24 * 3600.0  # seconds


class TooFewSitesError(TrainingError):
    """Too few sites can take part, whatever method is trained."""


class Roster:
    """Maps agents to nodes.

    Flower's node ids are random, so a site reports its own agent number. With a registry of sites
    it must sign with a key that is registered for that number; while a key is rotated, the node
    with the newest one is asked. Without a registry, if several nodes claim a number, its current
    holder keeps it while online; without a holder all of them are excluded.
    """

    def __init__(
        self,
        grid: Grid,
        plan: Plan,
        authentication: Authentication,
        record: Recording = lambda event: None,
    ) -> None:
        self._grid, self._plan, self.authentication = grid, plan, authentication
        self._record = record
        self._registry = authentication.registry
        self._claims: dict[int, tuple[int, str] | None] = {}  # None: no usable reply
        self._queries = Pending(grid, authentication, plan.reply_limit)
        self._queried_at: dict[int, float] = {}
        self.nodes: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.connected: set[int] = set()  # also those that have not answered yet
        self._excluded: dict[int, str] = {}  # nodes that are online, and why

    @property
    def excluded(self) -> dict[int, str]:
        """Why the sites of agents are excluded; without nodes whose agent is not known."""
        reasons = ((self._agent_of(node), reason) for node, reason in self._excluded.items())
        return {agent: reason for agent, reason in reasons if agent is not None}

    def label(self, agent: int) -> str:
        """The name of an agent's site in messages."""
        return site_label(agent, self.names)

    def labels(self, agents: Iterable[int]) -> str:
        """The labels of several agents."""
        return ", ".join(map(self.label, agents))

    def refresh(self) -> None:
        """Query new nodes and re-query those that timed out; late replies are accepted."""
        online = set(self._grid.get_node_ids())
        self.authentication.reload()
        self.names |= self.authentication.names(self._plan.agents)
        if self.authentication.registry != self._registry:
            self._registry = self.authentication.registry
            self._forget_unregistered()
        self._claims = {node: claim for node, claim in self._claims.items() if node in online}
        self._excluded = {n: why for n, why in self._excluded.items() if n in self._claims}
        self._queries.keep(online - self._claims.keys())
        new = online - self._claims.keys() - self._queries.nodes
        now = time.monotonic()
        overdue = {n for n in self._queries.nodes if now - self._queried_at[n] > self._plan.wait}
        self._queried_at |= dict.fromkeys(new | overdue, now)
        queries = [
            Message(content(version=VERSION), node, MessageType.QUERY, ttl=QUERY_TTL)
            for node in sorted(new | overdue)
        ]
        self._queries.add(queries, self._grid.push_messages(queries) if queries else [])
        self.connected = {agent for node in online if (agent := self._agent_of(node)) is not None}
        if new:  # their replies are waited for
            self._tell()
        replies = self._queries.replies(self._plan.wait if new else 0)
        for node, reply in replies.items():
            self._claims[node] = self._claim(node, reply)
        self._assign(replies)
        self.connected |= self.nodes.keys()
        self._tell()

    def _tell(self) -> None:
        joined, connected = frozenset(self.nodes), frozenset(self.connected)
        self._record(SitesSeen(joined, dict(self.names), connected, self.excluded))

    def _agent_of(self, node: int) -> int | None:
        """The agent of a node, if it is known: from its reply, or by its registered key."""
        claim = self._claims.get(node)
        return claim[0] if claim else self.authentication.number_of(node, self._plan.agents)

    def _forget_unregistered(self) -> None:
        """After a change of the registry, query all nodes again whose site it does not confirm."""
        for node, claim in list(self._claims.items()):
            site = self.authentication.site_of(node)
            if claim is None or site is None or site.number != claim[0]:
                del self._claims[node]

    def _claim(self, node: int, reply: Reply) -> tuple[int, str] | None:
        try:
            agent, name = read_identity(usable(reply), self._plan.agents)
            if self.authentication.registry is None:
                return agent, name
            site = self.authentication.site_of(node)
            if site is None or site.number != agent:
                raise PayloadError(f"it claims the number {agent}, which is not its own")
            return agent, site.name
        except PayloadError as error:
            self._exclude(node, str(error))
            return None

    def _exclude(self, node: int, reason: str) -> None:
        who = self.authentication.label(node)
        LOG.warning("%s is excluded: %s", who, reason)
        self._record(Excluded(who, reason))
        self._excluded[node] = reason

    def _assign(self, new: Collection[int]) -> None:
        claims = {node: claim[0] for node, claim in self._claims.items() if claim is not None}
        held = {agent: node for agent, node in self.nodes.items() if node in claims}
        claimants = Counter(claims.values())
        for node in sorted(claims, key=self.authentication.rank):
            agent = claims[node]
            if claimants[agent] == 1 or self.authentication.registry:
                held[agent] = node
            elif node in new:
                self._exclude(node, f"another node also claims to be {self.label(agent)}")
        before, self.nodes = self.nodes, dict(sorted(held.items()))
        for agent, node in self.nodes.items():
            claim = self._claims[node]
            assert claim is not None
            self.names[agent] = claim[1]
            self._excluded.pop(node, None)
            if before.get(agent) != node:
                self._record(Joined(agent, claim[1], self.authentication.key_of(node)))
        for agent in before.keys() - self.nodes.keys():
            self._record(Left(agent))

    def wait_for(self, agents: Collection[int], least: int) -> None:
        """Wait until at least ``least`` of these agents are online, up to the plan's timeout.

        Not for sites that are excluded: they are not asked again.
        """
        end = time.monotonic() + self._plan.wait
        self.refresh()
        while len(self.nodes.keys() & set(agents)) < least and time.monotonic() < end:
            if not self._absent(agents):
                return
            time.sleep(POLL_INTERVAL)
            self.refresh()

    def _absent(self, agents: Iterable[int]) -> bool:
        """Whether some of these agents are neither online nor excluded, by number or unknown."""
        missing = set(agents) - self.nodes.keys() - self.excluded.keys()
        return len(missing) > len(self._unknown())

    def _unknown(self) -> list[int]:
        """The excluded nodes whose agent is not known."""
        return [node for node in self._excluded if self._agent_of(node) is None]

    def gather(self) -> None:
        """Wait for all agents; raise if fewer than a quorum are online."""
        plan = self._plan
        self.wait_for(range(plan.agents), plan.agents)
        missing = [agent for agent in range(plan.agents) if agent not in self.nodes]
        training = [agent for agent in plan.seen if agent in self.nodes]
        if len(training) < max(1, plan.rules.min_updates):
            absent = self._absent(missing)
            raise TooFewSitesError(
                f"{len(self.nodes)} of {plan.agents} sites take part"
                + (f" after {plan.wait:g} s" if absent else "")
                + f" (without {self._reasons(missing)}), and a round needs "
                f"{max(1, plan.rules.min_updates)} that train: "
                + (
                    "start the sites, each with its own number, or raise federation.wait"
                    if absent
                    else "correct that at the excluded sites"
                )
            )
        if missing:
            LOG.warning("training starts without %s", self._reasons(missing))

    def _reasons(self, agents: Iterable[int]) -> str:
        """Sites that do not take part, with the reasons of excluded ones."""
        known = self.excluded
        why = [(self.label(agent), known.get(agent, "")) for agent in agents]
        why += [(self.authentication.label(n), self._excluded[n]) for n in self._unknown()]
        return by_reason(why)


class Exclusions:
    """Why agents are excluded.

    Args:
        folder: the run directory; None: kept in memory only.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._path = folder and folder / EXCLUDED
        self._agents: dict[int, RoundReason] = {}
        if self._path and self._path.exists():
            record = checked(ExclusionsRecord, read_sealed(self._path).about, self._path)
            self._agents = {int(agent): each for agent, each in record.agents.items()}

    def note(self, round: int, replies: Mapping[int, Reply], names: Mapping[int, str]) -> None:
        """Exclude the agents whose reply requires it."""
        for agent, reply in replies.items():
            if isinstance(reply, NoReply) and reply.excluded:
                who = site_label(agent, names)
                LOG.error("%s is excluded from this run: %s", who, reply.reason)
                self.add(agent, round, reply.reason)

    def add(self, agent: int, round: int, reason: str) -> None:
        """Exclude an agent from now on."""
        self._agents[agent] = RoundReason(round=round, reason=reason)
        if self._path:
            agents = {str(agent): each for agent, each in sorted(self._agents.items())}
            write_sealed(self._path, ExclusionsRecord(agents=agents).model_dump())

    def reason(self, agent: int) -> str | None:
        """Why an agent is excluded; None if it is not."""
        exclusion = self._agents.get(agent)
        if exclusion is None:
            return None
        return f"excluded since round {exclusion.round}: {exclusion.reason}"


class Refusals:
    """The sites that have refused every request so far, and why."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._reasons: dict[int, str] = {}
        self._worked: set[int] = set()

    def note(self, replies: Mapping[int, Reply]) -> None:
        """Note the replies of agents."""
        for agent, reply in replies.items():
            if not isinstance(reply, NoReply):
                self._worked.add(agent)
                self._reasons.pop(agent, None)
            elif reply.refused and agent not in self._worked:
                self._reasons[agent] = reply.reason

    def check(self, names: Mapping[int, str]) -> None:
        """Stop the training if the sites that are left can't reach a quorum."""
        plan = self._plan
        needed = max(1, plan.rules.min_updates)
        left = [agent for agent in plan.seen if agent not in self._reasons]
        if len(left) >= needed:
            return
        said = by_reason((site_label(a, names), why) for a, why in sorted(self._reasons.items()))
        raise TooFewSitesError(
            f"{len(left)} of {len(plan.seen)} sites can train, and a round needs {needed} "
            f"({said}); correct the data at these sites, or the configuration, and check each "
            "with `nufed federate check`"
        )


def site_label(agent: int, names: Mapping[int, str]) -> str:
    """A site's number, with its name if it has one.

    >>> site_label(3, {3: "Ward 3"}), site_label(4, {4: "4"})
    ('site 3 (Ward 3)', 'site 4')
    """
    name = names.get(agent, "")
    return f"site {agent}" + (f" ({name})" if name not in ("", str(agent)) else "")


def by_reason(reasons: Iterable[tuple[str, str]]) -> str:
    """Sites with their reasons, each named once; without a reason a site is only named.

    >>> by_reason([("site 0", "late"), ("site 1", ""), ("site 2", "late")])
    'site 0, site 2: late; site 1'
    """
    sites: dict[str, list[str]] = {}
    for who, reason in reasons:
        sites.setdefault(reason, []).append(who)
    return "; ".join(f"{_listed(of)}{reason and f': {reason}'}" for reason, of in sites.items())


def _listed(sites: list[str]) -> str:
    more = len(sites) - LISTED
    return ", ".join(sites[:LISTED]) + (f" and {more} more" if more > 0 else "")
