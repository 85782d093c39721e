"""Replies of sites: pulled with bounded sizes, matched to requests, and authenticated.

A reply that is too large is refused before its content is read. Flower stores a message as a tree
of objects (message, records, arrays, chunks of arrays), each by the SHA-256 of its content. An
array may contain one chunk many times, so that a few megabytes sent become gigabytes once the array
is assembled. ``Grid.pull_messages`` assembles everything; here objects are pulled level by level
from the root, each chunk is charged with its size times its number of occurrences, and the declared
size of every response is checked before its body is read.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import TypeAlias

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from nufed.errors import Fault, InputError, shown, visible
from nufed.flower import internals
from nufed.flower.app.payload import NoReply, PayloadError, Reply
from nufed.flower.app.registry import Authentication
from nufed.flower.logs import LOG

REFUSED = f"{InputError.__module__}.{InputError.__qualname__}"  # raised at a site
MAX_REASON = 500  # characters kept of a site's error message
POLL_INTERVAL = 0.25  # seconds
MAX_TRANSFERS = 2  # replies that are pulled in the background at once
STALLED = 30.0  # seconds after which a transfer no longer makes others wait
OnReply: TypeAlias = Callable[[int, Reply], Reply]


class Pending:
    """Messages that were sent to nodes and await a reply.

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

    def add(self, messages: Sequence[Message], ids: Iterable[str | None]) -> set[int]:
        """Await replies to messages that were pushed; returns the nodes to which that failed."""
        nodes = [message.metadata.dst_node_id for message in messages]
        sent = {id: node for id, node in zip(ids, nodes, strict=False) if id is not None}
        self._pending |= sent
        return set(nodes) - set(sent.values())

    def replies(
        self, seconds: float, on_reply: OnReply = lambda node, reply: reply
    ) -> dict[int, Reply]:
        """What ``on_reply`` keeps of the replies received so far or within the timeout."""
        kept: dict[int, Reply] = {}
        end = time.monotonic() + seconds
        while self._pending:
            for message_id, node in list(self._pending.items()):
                reply = self._received(message_id)
                if reply is not None:
                    kept[node] = on_reply(node, self._accepted(node, message_id, reply))
                    del self._pending[message_id]
                del reply  # it may be large, and the next one is pulled meanwhile
            if not self._pending or time.monotonic() > end:
                break
            time.sleep(POLL_INTERVAL)
        return kept

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
            return poll.reply
        self._polls[message_id] = poll
        return None

    def _accepted(self, node: int, message_id: str, reply: Reply) -> Reply:
        try:
            if isinstance(reply, RecordDict):
                return self._authentication.accept(node, message_id, reply)
        except PayloadError as error:
            return NoReply(str(error), error.fault)
        except (TypeError, ValueError, RecursionError) as error:  # values of unexpected types
            return NoReply(f"its reply can't be read ({type(error).__name__})")
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
        self.reply: Reply | None = None
        self.start()
        self.join(POLL_INTERVAL)

    def run(self) -> None:
        try:
            self.reply = _pulled(self._grid, self._message_id, self._limit)
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


def _pulled(grid: Grid, message_id: str, limit: ReplyLimit) -> Reply | None:
    """The reply to a message, the reason why it can't be used, or None if there is none yet."""
    try:
        replies = pull_replies(grid, message_id, limit)
    except (httpx.HTTPError, OSError):  # the SuperLink is unreachable
        raise
    except ReplyTooLargeError as error:
        return NoReply(f"its reply is too large: {error}", excluded=True)
    except Exception as error:
        return NoReply(f"its reply can't be read ({type(error).__name__})")
    for reply in replies:
        if reply.metadata.reply_to_message_id != message_id:
            LOG.warning("discarded a reply that matches no request of this run")
        elif reply.has_error():
            return _failure(str(reply.error.reason), reply.error.code)
        else:
            return reply.content
    return None


def _failure(text: str, code: int = internals.ErrorCode.UNKNOWN) -> NoReply:
    """A site's failure from Flower's error text: the class and message of an exception.

    A line break would forge a log line, and control characters may steer a terminal.
    """
    raised = internals.read_error(text)
    if raised is None:
        return NoReply(f"it failed: {shown(text)}", Fault.AT_SITE)
    said = visible(raised[1][:MAX_REASON])
    if code == internals.ErrorCode.INVALID_FAB:  # from the site itself: the app did not run
        return NoReply(f"it {said}", refused=True)
    return NoReply(f"it failed: {said}", Fault.AT_SITE, refused=raised[0] == REFUSED)


# the types of objects at each level of a message's tree; the chunks of arrays are the last level
RECORDS = {"ArrayRecord", "ConfigRecord", "MetricRecord"}
LEVELS = ({"Message"}, {"RecordDict"}, RECORDS, {"Array"})
CHUNK = "ArrayChunk"
RESPONSE_OVERHEAD = 64  # bytes of a response in addition to the object's content
MIB = 2**20


@dataclass(frozen=True)
class ReplyLimit:
    """Bytes that a reply may have: in its arrays once assembled, and in everything else."""

    arrays: int
    records: int


class ReplyTooLargeError(Exception):
    """A reply exceeds its limit; says by what."""


def pull_replies(grid: Grid, message_id: str, limit: ReplyLimit) -> list[Message]:
    """The replies to a message that have arrived.

    Raises:
        ReplyTooLargeError: a reply exceeds ``limit``; it is deleted at the SuperLink.
    """
    replies = internals.replies_at(grid, _check_declared_size)
    if replies is None:
        return list(grid.pull_messages([message_id]))
    with _Budget(limit.records, "the ids of its objects").limits_responses():
        arrived = replies.to(message_id)
    return [_pull(replies, reply, limit) for reply in arrived]


def _pull(replies: internals.Replies, root: str, limit: ReplyLimit) -> Message:
    """Pull and assemble the message ``root``, and delete it at the SuperLink."""
    try:
        records = _Budget(limit.records, "its records")
        contents: internals.Objects = {}
        level = Counter([root])
        for kinds in LEVELS:
            pulled = _pull_level(level, lambda id: records.pull(replies.pull, id), kinds)
            contents |= pulled
            level = sum(map(internals.children_of, pulled.values()), Counter())
        arrays = _Budget(limit.arrays, "its arrays")
        chunks = level
        contents |= _pull_level(
            chunks, lambda id: arrays.pull(replies.pull, id, chunks[id]), {CHUNK}
        )
    finally:
        replies.delete(root)
    return internals.inflate(root, contents)


def _pull_level(
    ids: Iterable[str], pull: Callable[[str], bytes], kinds: set[str]
) -> internals.Objects:
    """The contents of these objects, which must be of the given types."""
    contents = internals.pull_objects(list(ids), pull)
    for kind in map(internals.kind_of, contents.values()):
        if kind not in kinds:
            raise ValueError(f"an object of type {kind} instead of {sorted(kinds)}")
    return contents


class _Budget:
    """Bytes left for a part of a reply."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what, self._left, self._lock = most, what, most, threading.Lock()

    def pull(self, pull: Callable[[str], bytes], id: str, occurrences: int = 1) -> bytes:
        """An object that occurs so often; refused before it is read if it exceeds the budget."""
        with self.limits_responses(occurrences):
            content = pull(id)
            with self._lock:  # what was declared is replaced by what was read
                self._left += _CURRENT.reserved
                self._take(len(content) * occurrences)
        return content

    @contextmanager
    def limits_responses(self, occurrences: int = 1) -> Iterator[None]:
        """Refuse responses to this thread by their declared size, before their body is read."""
        _CURRENT.budget, _CURRENT.occurrences, _CURRENT.reserved = self, occurrences, 0
        try:
            yield
        finally:
            _CURRENT.budget = None

    def reserve(self, size: int) -> None:
        """Reserve what a response declares, before it is read: others are read meanwhile."""
        with self._lock:
            self._take(size - _CURRENT.reserved)  # a retry replaces its first try
            _CURRENT.reserved = size

    def _take(self, size: int) -> None:
        """Refuse what exceeds the rest."""
        if size > self._left:
            total = self._most - self._left + size
            raise ReplyTooLargeError(
                f"{self._what} have {total / MIB:.4g} MiB or more: a reply of this plan has at "
                f"most {self._most / MIB:.4g} MiB"
            )
        self._left -= size


_CURRENT = threading.local()  # the budget of the object that this thread pulls


def _check_declared_size(response: httpx.Response) -> None:
    """Called by httpx before a response's body is read."""
    budget = getattr(_CURRENT, "budget", None)
    if budget is not None and response.is_success:
        declared = int(response.headers["content-length"])
        budget.reserve(max(0, declared - RESPONSE_OVERHEAD) * _CURRENT.occurrences)
