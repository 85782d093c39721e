"""Sends requests to sites over a Flower Grid, matches replies to them and enforces deadlines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from threading import Thread
from typing import TypeAlias

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from nufed.errors import Fault, InputError, shown, visible
from nufed.flower.app.bounded_pull import ReplyLimit, ReplyTooLargeError, pull_replies
from nufed.flower.app.payload import NoReply, PayloadError, Reply
from nufed.flower.app.registry import Authentication
from nufed.flower.internals import ErrorCode, read_error
from nufed.server import TOO_LATE

LOG = logging.getLogger("nufed")
REFUSED = f"{InputError.__module__}.{InputError.__qualname__}"  # raised at a site
NOT_SENT = NoReply("the request could not be sent to it")
LATE = NoReply(TOO_LATE, Fault.LATE)
MAX_REASON = 500  # characters kept of a site's error message
POLL_INTERVAL = 0.25  # seconds
MAX_TRANSFERS = 2  # replies that are pulled in the background at once
STALLED = 30.0  # seconds after which a transfer no longer makes others wait
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
    silent |= dict.fromkeys(contents.keys() - replies.keys() - silent.keys(), LATE)
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


def _failure(text: str, code: int = ErrorCode.UNKNOWN) -> NoReply:
    """A site's failure from Flower's error text: the class and message of an exception.

    A line break would forge a log line, and control characters may steer a terminal.
    """
    raised = read_error(text)
    if raised is None:
        return NoReply(f"it failed: {shown(text)}", Fault.AT_SITE)
    said = visible(raised[1][:MAX_REASON])
    if code == ErrorCode.INVALID_FAB:  # from the site itself: the app did not run
        return NoReply(f"it {said}", refused=True)
    return NoReply(f"it failed: {said}", Fault.AT_SITE, refused=raised[0] == REFUSED)
