"""Requests to the sites of agents: the way of a message from a round to a site and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from nufed.algorithms.protocol import State
from nufed.errors import Fault
from nufed.flower.app.events import Answered, Asked, Recording
from nufed.flower.app.payload import (
    ARRAYS,
    OWN,
    NoReply,
    Reply,
    content,
    curvature_record,
    method_record,
    size_of,
    to_arrays,
)
from nufed.flower.app.plan import Plan
from nufed.flower.app.privacy import Account
from nufed.flower.app.replies import Pending
from nufed.flower.app.roster import Exclusions, Refusals, Roster
from nufed.flower.logs import LOG
from nufed.flower.secure_sum.messages import TRAINS
from nufed.flower.secure_sum.server import Replies
from nufed.lab.files import sha256, tensor_pieces
from nufed.lab.runs.federation_records import Phase, TrafficLine
from nufed.server import TOO_LATE, Downlink

NOT_SENT = NoReply("the request could not be sent to it")
LATE = NoReply(TOO_LATE, Fault.LATE)
TTL_MARGIN = 60.0  # seconds that Flower keeps a message beyond the deadline: clocks differ


class Transport:
    """Sends requests to the sites of agents and returns their replies.

    Args:
        grid: reaches the sites.
        plan: what is trained.
        run: the run's id.
        roster: the nodes of agents.
        exclusions: agents that are not sent requests; those found to need it are added.
        account: the privacy account, which counts requests for updates, if there is one.
        taken: each agent's last round whose update was accepted.
        record: records what happens.

    ``longest`` is the longest time of a site's training in a round so far, in seconds.
    """

    def __init__(
        self,
        grid: Grid,
        plan: Plan,
        run: str,
        roster: Roster,
        exclusions: Exclusions,
        account: Account | None,
        taken: Mapping[int, int],
        record: Recording,
    ) -> None:
        self._grid, self._plan, self._run, self.roster = grid, plan, run, roster
        self._exclusions, self._account, self._taken = exclusions, account, taken
        self._record, self._refusals = record, Refusals(plan)
        self.longest = 0.0

    def ask(
        self,
        kind: str,
        round: int,
        agents: Iterable[int],
        sent: State | None = None,
        *,
        records: Callable[[int], Mapping[str, ConfigRecord]] = lambda agent: {},
        deadline: float | None = None,
        keep: Callable[[int, RecordDict], RecordDict] = lambda agent, reply: reply,
        **about: Any,
    ) -> Replies:
        """The agents' replies within the deadline, in order, and those whose site is offline.

        Instead of a reply, the reason why there is none; excluded agents are sent no request.

        Args:
            kind: of the messages.
            round: that they are about.
            agents: whose sites are asked.
            sent: the vectors that are sent (:func:`nufed.server.to_send`); None: there are none.
            records: further records for each agent.
            deadline: in seconds; by default the plan's.
            keep: called with an agent and its reply as it arrives; returns what is kept of it.
            about: further metadata.
        """
        agents, phase, seconds = list(agents), _phase(kind), deadline or self._plan.deadline
        self.roster.refresh()
        excluded = {a: NoReply(why) for a in agents if (why := self._exclusions.reason(a))}
        nodes = {agent: self.roster.nodes.get(agent) for agent in agents if agent not in excluded}
        offline = [agent for agent, node in nodes.items() if node is None]
        if offline:
            LOG.warning("round %d: offline: %s", round, self.roster.labels(offline))
        asked = {node: agent for agent, node in nodes.items() if node is not None}
        down = None if sent is None else Downlink.of(sent)
        contents = self._contents(round, asked.values(), down, records, about)
        if self._account and kind in TRAINS:
            self._account.requested(contents)
        digest = None if down is None else _digest(down.shared, contents.values())
        self._record(Asked(kind, round, list(contents), digest))
        began, ttl = time.monotonic(), seconds + TTL_MARGIN

        def arrived(node: int, reply: Reply) -> Reply:
            agent, took = asked[node], time.monotonic() - began
            answered = not isinstance(reply, NoReply)
            if phase == "train" and answered:
                self.longest = max(self.longest, took)
            sizes = {
                "bytes_down": size_of(contents[agent]),
                "bytes_up": size_of(reply) if isinstance(reply, RecordDict) else 0,
            }
            self._record(TrafficLine(round=round, phase=phase, agent=agent, seconds=took, **sizes))
            return keep(agent, reply) if isinstance(reply, RecordDict) else reply

        messages = [Message(contents[agent], node, kind, ttl=ttl) for node, agent in asked.items()]
        pending = Pending(self._grid, self.roster.authentication, self._plan.reply_limit)
        ids = self._grid.push_messages(messages) if messages else []
        unsent = pending.add(messages, ids)
        by_node = pending.replies(seconds, arrived)
        missing = {node: NOT_SENT if node in unsent else LATE for node in asked.keys() - by_node}
        by_node |= {node: arrived(node, reason) for node, reason in missing.items()}
        replies = {agent: by_node[node] for node, agent in asked.items()}
        self._note(kind, round, replies)
        replies |= excluded
        return {agent: replies[agent] for agent in agents if agent in replies}, offline

    def _contents(
        self,
        round: int,
        agents: Iterable[int],
        down: Downlink | None,
        records: Callable[[int], Mapping[str, ConfigRecord]],
        about: Mapping[str, Any],
    ) -> dict[int, RecordDict]:
        """The contents of the messages, by agent."""
        arrays = {} if down is None else {ARRAYS: to_arrays(down.shared)}  # one copy for all sites
        contents = {}
        for agent in agents:
            contents[agent] = content(
                run=self._run,
                agent=agent,
                round=round,
                taken=self._taken.get(agent, 0),
                released=self._account.released_by(agent) if self._account else 0,
                **about,
            )
            contents[agent].update({**arrays, **records(agent), **method_record(self._plan.method)})
            contents[agent].update(curvature_record(self._plan.curvature))
            individual = {} if down is None else down.own(agent)
            if individual:
                contents[agent][OWN] = to_arrays(individual)
        return contents

    def _note(self, kind: str, round: int, replies: Mapping[int, Reply]) -> None:
        """Record who answered, exclude sites whose reply requires it; stop without enough sites."""
        answered = [agent for agent, reply in replies.items() if isinstance(reply, RecordDict)]
        self._record(Answered(kind, round, answered))
        self._exclusions.note(round, replies, self.roster.names)
        self._refusals.note(replies)
        self._refusals.check(self.roster.names)


def _digest(shared: State, contents: Iterable[RecordDict]) -> str:
    """Digest of all vectors in the contents of messages; shared ones count once."""
    records = (each[OWN] for each in contents if OWN in each)
    individual = [
        array.data for each in records if isinstance(each, ArrayRecord) for array in each.values()
    ]
    return sha256([*tensor_pieces(shared), *individual])


def _phase(kind: str) -> Phase:
    if kind in TRAINS:
        return "train"
    return "secure sum" if kind.startswith(MessageType.TRAIN) else "evaluate"
