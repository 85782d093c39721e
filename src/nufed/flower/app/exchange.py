"""Requests to the sites of agents: audited, measured, and stopped if sites can't ever answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from flwr.app import MessageType, RecordDict
from flwr.serverapp import Grid

from nufed.algorithms.protocol import State
from nufed.files import sha256, tensor_pieces
from nufed.flower.app.exclusions import Exclusions, Refusals
from nufed.flower.app.messaging import request
from nufed.flower.app.monitor import Monitor
from nufed.flower.app.payload import NoReply, Reply
from nufed.flower.app.plan import Plan
from nufed.flower.app.roster import Roster
from nufed.flower.secure_sum.messages import TRAINS
from nufed.lab.runs.audit_log import Audit
from nufed.lab.runs.federation_records import Phase


class Exchange:
    """Sends requests to the sites that a roster names, and records the replies.

    ``longest`` is the longest time of a site's training in a round so far, in seconds.
    """

    def __init__(
        self,
        grid: Grid,
        plan: Plan,
        roster: Roster,
        exclusions: Exclusions,
        monitor: Monitor,
        audit: Audit,
    ) -> None:
        self._grid, self._plan, self._roster = grid, plan, roster
        self._exclusions = exclusions
        self._monitor, self._audit = monitor, audit
        self._refusals = Refusals(plan)
        self.longest = 0.0
        roster.on_refresh = lambda: monitor.sees(
            roster.nodes, roster.names, roster.connected, roster.excluded
        )

    def ask(
        self,
        kind: str,
        round: int,
        sent: State | None,
        contents: Mapping[int, RecordDict],
        deadline: float,
        keep: Callable[[int, RecordDict], RecordDict] = lambda agent, reply: reply,
    ) -> dict[int, Reply]:
        """The reply of every agent within the deadline, or the reason why there is none.

        Args:
            kind: of the messages.
            round: that they are about.
            sent: the vectors in them; None: there are none.
            contents: their contents, by agent.
            deadline: in seconds.
            keep: called with an agent and its reply as it arrives; returns what is kept of it.
        """
        what = {"what": kind, "round": round}
        digest = {} if sent is None else {"vectors_sha256": sha256(tensor_pieces(sent))}
        self._audit("asked", **what, sites=list(contents), **digest)
        nodes = {agent: self._roster.nodes[agent] for agent in contents}
        agents = {node: agent for agent, node in nodes.items()}
        phase = _phase(kind)
        self._monitor.asks(phase)
        began = time.monotonic()

        def on_reply(node: int, reply: Reply) -> Reply:
            agent, seconds = agents[node], time.monotonic() - began
            if phase == "train" and not isinstance(reply, NoReply):
                self.longest = max(self.longest, seconds)
            self._monitor.exchanged(phase, round, agent, contents[agent], reply, seconds)
            return reply if isinstance(reply, NoReply) else keep(agent, reply)

        messages = {nodes[agent]: content for agent, content in contents.items()}
        found = request(
            self._grid,
            kind,
            messages,
            deadline,
            self._roster.authentication,
            self._plan.reply_limit,
            on_reply,
        )
        replies = {agent: found[node] for agent, node in nodes.items()}
        answered = [agent for agent, reply in replies.items() if isinstance(reply, RecordDict)]
        self._audit("answered", **what, sites=answered)
        self._exclusions.note(round, replies, self._roster.names)
        self._refusals.note(replies)
        self._refusals.check(self._roster.names)
        return replies


def _phase(kind: str) -> Phase:
    if kind in TRAINS:
        return "train"
    return "secure sum" if kind.startswith(MessageType.TRAIN) else "evaluate"
