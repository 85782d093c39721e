"""Asking sites over a Grid: whose answer is whose, who is late, and which node is which agent."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping
from threading import Thread

import httpx
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from nufed.errors import TrainingError, shown
from nufed.flower.payload import PayloadError, read_who
from nufed.flower.plan import Plan
from nufed.server import TOO_LATE
from nufed.text import visible

LOG = logging.getLogger("nufed")
NOT_SENT = "the message to it could not be sent"
MOST_SAID = 500  # letters of a site's error
PAUSE = 0.5  # seconds between looks for answers
A_DAY = 24 * 3600.0
LONGER = 60.0  # seconds that Flower keeps a message beyond the deadline: clocks differ


def ask(
    grid: Grid, kind: str, contents: Mapping[int, RecordDict], seconds: float
) -> dict[int, RecordDict | str]:
    """What every node answered, or why there is no answer."""
    questions = Questions(grid)
    answers: dict[int, RecordDict | str] = dict.fromkeys(contents, TOO_LATE)
    answers |= dict.fromkeys(questions.send(kind, contents, seconds + LONGER), NOT_SENT)
    return answers | questions.answers(seconds)


class Questions:
    """Messages that were sent, and whose answers are waited for.

    Whose an answer is follows from the message that it replies to: what Flower says of the sender
    is wrong where a node is gone. Answers are pulled one by one, since one that can't be read would
    lose the others, and one of which parts are still under way would hold them up for hours.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._open: dict[str, int] = {}  # the node that each message went to
        self._looks: dict[str, _Look] = {}

    @property
    def nodes(self) -> set[int]:
        """The nodes that have not answered yet."""
        return set(self._open.values())

    def send(self, kind: str, contents: Mapping[int, RecordDict], ttl: float) -> set[int]:
        """Ask nodes; returns those to which nothing could be sent."""
        messages = [Message(content, node, kind, ttl=ttl) for node, content in contents.items()]
        numbers = list(self._grid.push_messages(messages)) if messages else []
        sent = {n: node for n, node in zip(numbers, contents, strict=False) if n is not None}
        self._open |= sent
        return contents.keys() - set(sent.values())

    def answers(self, seconds: float) -> dict[int, RecordDict | str]:
        """What came in so far, or comes in so many seconds."""
        found: dict[int, RecordDict | str] = {}
        end = time.monotonic() + seconds
        while self._open:
            for number, node in list(self._open.items()):
                look = self._looks.pop(number, None) or _Look(self._grid, number)
                if not look.ended():
                    self._looks[number] = look
                elif look.found is not None:
                    found[node] = look.found
                    del self._open[number]
            if not self._open or time.monotonic() > end:
                break
            time.sleep(PAUSE)
        return found

    def keep(self, nodes: set[int]) -> None:
        """Wait for these nodes only."""
        self._open = {number: node for number, node in self._open.items() if node in nodes}


class _Look(Thread):
    """A look for the answer to a message; one that takes long goes on beside the others."""

    def __init__(self, grid: Grid, number: str) -> None:
        super().__init__(daemon=True)
        self._grid, self._number = grid, number
        self._raised: BaseException | None = None
        self.found: RecordDict | str | None = None
        self.start()
        self.join(PAUSE)

    def run(self) -> None:
        try:
            self.found = _pull(self._grid, self._number)
        except BaseException as error:
            self._raised = error

    def ended(self) -> bool:
        """Whether it has ended; what it raised is raised here."""
        ended = not self.is_alive()
        if self._raised is not None:
            raise self._raised
        return ended


def _pull(grid: Grid, number: str) -> RecordDict | str | None:
    """The answer to a message, why it can't be used, or None if it is not there yet."""
    try:
        replies = list(grid.pull_messages([number]))
    except (httpx.HTTPError, OSError):  # it is the SuperLink that can't be reached
        raise
    except Exception as error:
        return f"its answer can't be read ({type(error).__name__})"
    for reply in replies:
        if reply.metadata.reply_to_message_id != number:
            LOG.warning("an answer to no question of this run was thrown away")
        elif reply.has_error():
            return f"it failed: {_plain(str(reply.error.reason))}"
        else:
            return reply.content
    return None


def _plain(reason: str) -> str:
    """Flower's words about an exception, without those around the exception's own.

    A line break would forge a line of the log, and other signs may steer a terminal.
    """
    raised = re.fullmatch(r"<class '[\w.]+'>:<'(.*)'>", reason, re.DOTALL)
    if not raised:
        return shown(reason)
    return visible(raised[1][:MOST_SAID])


class Roster:
    """Which node is which agent.

    Flower's node ids are random, so a site tells its own number. Where several nodes claim one, the
    one that has it keeps it while it is there; if none has it, it goes to none of them.
    """

    def __init__(self, grid: Grid, plan: Plan) -> None:
        self._grid, self._plan = grid, plan
        self._claims: dict[int, tuple[int, str] | None] = {}  # None: no usable answer
        self._questions = Questions(grid)
        self._asked: dict[int, float] = {}  # when
        self.nodes: dict[int, int] = {}
        self.names: dict[int, str] = {}

    def refresh(self) -> None:
        """Ask the nodes that are new who they are, and those that were silent once more.

        One that answers late comes in then.
        """
        online = set(self._grid.get_node_ids())
        self._claims = {node: claim for node, claim in self._claims.items() if node in online}
        self._questions.keep(online - self._claims.keys())
        new = online - self._claims.keys() - self._questions.nodes
        now = time.monotonic()
        silent = {n for n in self._questions.nodes if now - self._asked[n] > self._plan.wait}
        self._asked |= dict.fromkeys(new | silent, now)
        questions = {node: RecordDict() for node in sorted(new | silent)}
        self._questions.send(MessageType.QUERY, questions, A_DAY)
        answers = self._questions.answers(self._plan.wait if new else 0)
        for node, answer in answers.items():
            self._claims[node] = self._claim(node, answer)
        self._assign(answers)

    def _claim(self, node: int, answer: RecordDict | str) -> tuple[int, str] | None:
        try:
            if isinstance(answer, str):
                raise PayloadError(answer)
            return read_who(answer, self._plan.agents)
        except PayloadError as error:
            LOG.warning("node %d takes no part: %s", node, error)
            return None

    def _assign(self, new: Collection[int]) -> None:
        claims = {node: claim[0] for node, claim in self._claims.items() if claim is not None}
        held = {agent: node for agent, node in self.nodes.items() if node in claims}
        number = Counter(claims.values())
        for node, agent in claims.items():
            if number[agent] == 1:
                held[agent] = node
            elif node in new:
                LOG.warning(
                    "node %d takes no part: it says that it is agent %d, and so does another",
                    node,
                    agent,
                )
        self.nodes = dict(sorted(held.items()))
        for agent, node in self.nodes.items():
            claim = self._claims[node]
            assert claim is not None
            self.names[agent] = claim[1]

    def wait_for(self, agents: Collection[int], least: int) -> None:
        """Wait until so many of these agents are there, at most as long as the plan says."""
        end = time.monotonic() + self._plan.wait
        self.refresh()
        while len(self.nodes.keys() & set(agents)) < least and time.monotonic() < end:
            time.sleep(PAUSE)
            self.refresh()

    def gather(self) -> None:
        """Wait for all agents; some must come."""
        plan = self._plan
        self.wait_for(range(plan.agents), plan.agents)
        missing = [agent for agent in range(plan.agents) if agent not in self.nodes]
        there = [agent for agent in plan.seen if agent in self.nodes]
        if len(there) < max(1, plan.rules.min_updates):
            raise TrainingError(
                f"of {plan.agents} sites only agents {list(self.nodes)} came within "
                f"{plan.wait:g} s, and a round needs {max(1, plan.rules.min_updates)} that train: "
                "start the sites, each with a number of its own, or wait longer"
            )
        if missing:
            LOG.warning("training begins without agents %s", missing)
