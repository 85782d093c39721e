"""Sends requests to sites over a Flower Grid, matches replies to them and enforces deadlines."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from threading import Thread
from typing import TypeAlias

import httpx
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from nufed.errors import InputError, TrainingError, shown, visible
from nufed.flower.app.authentication import Authentication
from nufed.flower.app.bounded_pull import ReplyLimit, ReplyTooLargeError, pull_replies
from nufed.flower.app.exclusions import Excluding
from nufed.flower.app.payload import PayloadError, content, read_identity
from nufed.flower.app.plan import Plan
from nufed.flower.app.refusals import Refusal
from nufed.flower.app.versions import VERSION
from nufed.runs.audit_log import Audit, not_audited
from nufed.server import TOO_LATE

LOG = logging.getLogger("nufed")
REFUSED = f"{InputError.__module__}.{InputError.__qualname__}"  # raised at a site
NOT_SENT = "the request could not be sent to it"
MAX_REASON = 500  # characters kept of a site's error message
POLL_INTERVAL = 0.25  # seconds
MAX_TRANSFERS = 2  # replies that are pulled in the background at once
STALLED = 30.0  # seconds after which a transfer no longer makes others wait
QUERY_TTL = 24 * 3600.0  # seconds
Reply: TypeAlias = RecordDict | str
"""A reply, or the reason why there is none."""
OnReply: TypeAlias = Callable[[int, Reply], Reply]
TTL_MARGIN = 60.0  # seconds that Flower keeps a message beyond the deadline: clocks differ


def request(
    grid: Grid,
    kind: str,
    contents: Mapping[int, RecordDict],
    seconds: float,
    authentication: Authentication,
    limit: ReplyLimit,
    on_reply: OnReply = lambda node, reply: reply,
) -> dict[int, Reply]:
    """Every node's authenticated reply within the deadline, or the reason why there is none.

    ``on_reply`` is called with a node and its reply, or that reason, as soon as it is known, and
    returns what is kept of it.
    """
    requests = Requests(grid, authentication, limit)
    silent = dict.fromkeys(requests.send(kind, contents, seconds + TTL_MARGIN), NOT_SENT)
    replies = requests.replies(seconds, on_reply)
    silent |= dict.fromkeys(contents.keys() - replies.keys() - silent.keys(), TOO_LATE)
    return {**{node: on_reply(node, reason) for node, reason in silent.items()}, **replies}


class Requests:
    """Messages sent to nodes and still awaiting a reply.

    A reply is matched by the id of the message it replies to: the sender that Flower reports is
    wrong once a node is gone. Replies are pulled one by one, since an unreadable one would lose the
    others, and an incompletely transferred one would block them for hours.
    """

    def __init__(self, grid: Grid, authentication: Authentication, limit: ReplyLimit) -> None:
        self._grid, self._authentication, self._limit = grid, authentication, limit
        self._pending: dict[str, int] = {}  # message id -> node
        self._polls: dict[str, _Poll] = {}

    @property
    def nodes(self) -> set[int]:
        """The nodes that have not replied yet."""
        return set(self._pending.values())

    def send(self, kind: str, contents: Mapping[int, RecordDict], ttl: float) -> set[int]:
        """Send a message to each node; returns the nodes to which sending failed."""
        messages = [Message(content, node, kind, ttl=ttl) for node, content in contents.items()]
        ids = list(self._grid.push_messages(messages)) if messages else []
        sent = {id: node for id, node in zip(ids, contents, strict=False) if id is not None}
        self._pending |= sent
        return contents.keys() - set(sent.values())

    def replies(
        self, seconds: float, on_reply: OnReply = lambda node, reply: reply
    ) -> dict[int, Reply]:
        """What ``on_reply`` keeps of the replies received so far or within the timeout."""
        found: dict[int, Reply] = {}
        end = time.monotonic() + seconds
        while self._pending:
            for message_id, node in list(self._pending.items()):
                reply = self._received(message_id)
                if reply is not None:
                    found[node] = on_reply(node, self._accepted(node, message_id, reply))
                    del self._pending[message_id]
                del reply  # it may be large, and the next one is pulled meanwhile
            if not self._pending or time.monotonic() > end:
                break
            time.sleep(POLL_INTERVAL)
        return found

    def _received(self, message_id: str) -> Reply | None:
        """The reply to a message, if it has arrived; a slow poll continues in the background.

        While several are slow, others wait: each holds the reply that it transfers.
        """
        poll = self._polls.pop(message_id, None)
        if poll is None:
            if sum(other.transfers for other in self._polls.values()) >= MAX_TRANSFERS:
                return None
            poll = _Poll(self._grid, message_id, self._limit)
        if poll.done():
            return poll.found
        self._polls[message_id] = poll
        return None

    def _accepted(self, node: int, message_id: str, reply: Reply) -> Reply:
        try:
            if isinstance(reply, RecordDict):
                return self._authentication.accept(node, message_id, reply)
        except PayloadError as error:
            return str(error)
        except (TypeError, ValueError, RecursionError) as error:  # values of unexpected types
            return f"its reply can't be read ({type(error).__name__})"
        return reply

    def keep(self, nodes: set[int]) -> None:
        """Stop waiting for all other nodes."""
        self._pending = {id: node for id, node in self._pending.items() if node in nodes}


class _Poll(Thread):
    """Polls once for the reply to a message; a slow poll continues in the background."""

    def __init__(self, grid: Grid, message_id: str, limit: ReplyLimit) -> None:
        super().__init__(daemon=True)
        self._grid, self._message_id, self._limit = grid, message_id, limit
        self._raised: BaseException | None = None
        self._stalled_at = time.monotonic() + STALLED
        self.found: Reply | None = None
        self.start()
        self.join(POLL_INTERVAL)

    def run(self) -> None:
        try:
            self.found = _pull(self._grid, self._message_id, self._limit)
        except BaseException as error:
            self._raised = error

    @property
    def transfers(self) -> bool:
        """Whether it runs, and not for so long that the site may never send the rest."""
        return self.is_alive() and time.monotonic() < self._stalled_at

    def done(self) -> bool:
        """Whether it has finished; re-raises its exception."""
        done = not self.is_alive()
        if self._raised is not None:
            raise self._raised
        return done


def _pull(grid: Grid, message_id: str, limit: ReplyLimit) -> Reply | None:
    """The reply to a message, the reason why it can't be used, or None if there is none yet."""
    try:
        replies = pull_replies(grid, message_id, limit)
    except (httpx.HTTPError, OSError):  # the SuperLink is unreachable
        raise
    except ReplyTooLargeError as error:
        return Excluding(f"its reply is too large: {error}")
    except Exception as error:
        return f"its reply can't be read ({type(error).__name__})"
    for reply in replies:
        if reply.metadata.reply_to_message_id != message_id:
            LOG.warning("discarded a reply that matches no request of this run")
        elif reply.has_error():
            return _failure(str(reply.error.reason))
        else:
            return reply.content
    return None


def _failure(text: str) -> str:
    """A site's failure from Flower's error text: the class and message of an exception.

    A line break would forge a log line, and control characters may steer a terminal.
    """
    raised = re.fullmatch(r"<class '([\w.]+)'>:<'(.*)'>", text, re.DOTALL)
    if not raised:
        return f"it failed: {shown(text)}"
    reason = f"it failed: {visible(raised[2][:MAX_REASON])}"
    return Refusal(reason) if raised[1] == REFUSED else reason


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
        self.on_refresh: Callable[[], None] = lambda: None

    def refresh(self) -> None:
        """Query new nodes and re-query those that timed out; late replies are accepted."""
        online = set(self._grid.get_node_ids())
        self.authentication.reload()
        if self.authentication.registry != self._registry:
            self._registry = self.authentication.registry
            self._forget_unregistered()
        self._claims = {node: claim for node, claim in self._claims.items() if node in online}
        self._queries.keep(online - self._claims.keys())
        new = online - self._claims.keys() - self._queries.nodes
        now = time.monotonic()
        overdue = {n for n in self._queries.nodes if now - self._queried_at[n] > self._plan.wait}
        self._queried_at |= dict.fromkeys(new | overdue, now)
        queries = {node: content(version=VERSION) for node in sorted(new | overdue)}
        self._queries.send(MessageType.QUERY, queries, QUERY_TTL)
        replies = self._queries.replies(self._plan.wait if new else 0)
        for node, reply in replies.items():
            self._claims[node] = self._claim(node, reply)
        self._assign(replies)
        self.on_refresh()

    def _forget_unregistered(self) -> None:
        """After a change of the registry, query all nodes again whose site it does not confirm."""
        for node, claim in list(self._claims.items()):
            site = self.authentication.site_of(node)
            if claim is None or site is None or site.number != claim[0]:
                del self._claims[node]

    def _claim(self, node: int, reply: Reply) -> tuple[int, str] | None:
        try:
            if isinstance(reply, str):
                raise PayloadError(reply)
            agent, name = read_identity(reply, self._plan.agents)
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

    def _assign(self, new: Collection[int]) -> None:
        claims = {node: claim[0] for node, claim in self._claims.items() if claim is not None}
        held = {agent: node for agent, node in self.nodes.items() if node in claims}
        claimants = Counter(claims.values())
        for node in sorted(claims, key=self.authentication.rank):
            agent = claims[node]
            if claimants[agent] == 1 or self.authentication.registry:
                held[agent] = node
            elif node in new:
                self._exclude(node, f"another node also claims to be agent {agent}")
        before, self.nodes = self.nodes, dict(sorted(held.items()))
        for agent, node in self.nodes.items():
            claim = self._claims[node]
            assert claim is not None
            self.names[agent] = claim[1]
            if before.get(agent) != node:
                key = self.authentication.key_of(node)
                self._audit("joined", site=agent, name=claim[1], key=key)
        for agent in before.keys() - self.nodes.keys():
            self._audit("left", site=agent)

    def wait_for(self, agents: Collection[int], least: int) -> None:
        """Wait until at least ``least`` of these agents are online, up to the plan's timeout."""
        end = time.monotonic() + self._plan.wait
        self.refresh()
        while len(self.nodes.keys() & set(agents)) < least and time.monotonic() < end:
            time.sleep(POLL_INTERVAL)
            self.refresh()

    def gather(self) -> None:
        """Wait for all agents; raise if fewer than a quorum are online."""
        plan = self._plan
        self.wait_for(range(plan.agents), plan.agents)
        missing = [agent for agent in range(plan.agents) if agent not in self.nodes]
        training = [agent for agent in plan.seen if agent in self.nodes]
        if len(training) < max(1, plan.rules.min_updates):
            raise TrainingError(
                f"only agents {list(self.nodes)} of {plan.agents} are online after {plan.wait:g} "
                f"s, and a round needs {max(1, plan.rules.min_updates)} that train: start the "
                "sites, each with its own number, or raise federation.wait"
            )
        if missing:
            LOG.warning("training starts without agents %s", missing)
