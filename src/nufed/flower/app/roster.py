"""The sites that take part in a run: which of Flower's nodes is which agent's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from flwr.app import MessageType
from flwr.serverapp import Grid

from nufed.flower.app.exclusions import TooFewSitesError, by_reason, site_label
from nufed.flower.app.messaging import LOG, POLL_INTERVAL, Requests
from nufed.flower.app.payload import (
    VERSION,
    PayloadError,
    Reply,
    content,
    read_identity,
    usable,
)
from nufed.flower.app.plan import Plan
from nufed.flower.app.registry import Authentication
from nufed.lab.runs.audit_log import Audit, not_audited

QUERY_TTL = 24 * 3600.0  # seconds


class Roster:
    """Maps agents to nodes.

    Flower's node ids are random, so a site reports its own agent number. With a registry of sites
    it must sign with a key that is registered for that number; while a key is rotated, the node
    with the newest one is asked. Without a registry, if several nodes claim a number, its current
    holder keeps it while online; without a holder all of them are excluded.
    """

    def __init__(
        self, grid: Grid, plan: Plan, authentication: Authentication, audit: Audit = not_audited
    ) -> None:
        self._grid, self._plan, self.authentication = grid, plan, authentication
        self._audit = audit
        self._registry = authentication.registry
        self._claims: dict[int, tuple[int, str] | None] = {}  # None: no usable reply
        self._queries = Requests(grid, authentication, plan.reply_limit)
        self._queried_at: dict[int, float] = {}
        self.nodes: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.connected: set[int] = set()  # also those that have not answered yet
        self._excluded: dict[int, str] = {}  # nodes that are online, and why
        self.on_refresh: Callable[[], None] = lambda: None

    @property
    def excluded(self) -> dict[int, str]:
        """Why the sites of agents are excluded; without nodes whose agent is not known."""
        reasons = ((self._agent_of(node), reason) for node, reason in self._excluded.items())
        return {agent: reason for agent, reason in reasons if agent is not None}

    def label(self, agent: int) -> str:
        """How messages name an agent's site."""
        return site_label(agent, self.names)

    def labels(self, agents: Iterable[int]) -> str:
        """The same for several."""
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
        queries = {node: content(version=VERSION) for node in sorted(new | overdue)}
        self._queries.send(MessageType.QUERY, queries, QUERY_TTL)
        self.connected = {agent for node in online if (agent := self._agent_of(node)) is not None}
        if new:  # their replies are waited for
            self.on_refresh()
        replies = self._queries.replies(self._plan.wait if new else 0)
        for node, reply in replies.items():
            self._claims[node] = self._claim(node, reply)
        self._assign(replies)
        self.connected |= self.nodes.keys()
        self.on_refresh()

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
        self._audit("excluded", who=who, reason=reason)
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
                key = self.authentication.key_of(node)
                self._audit("joined", site=agent, name=claim[1], key=key)
        for agent in before.keys() - self.nodes.keys():
            self._audit("left", site=agent)

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
