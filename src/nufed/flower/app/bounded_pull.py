"""Pulls replies of bounded size: a larger one is refused before its content is read.

Flower stores a message as a tree of objects (message, records, arrays, chunks of arrays), each by
the SHA-256 of its content. An array may contain one chunk many times, so that a few megabytes sent
become gigabytes once the array is assembled. ``Grid.pull_messages`` assembles everything; here
objects are pulled level by level from the root, each chunk is charged with its size times its
number of occurrences, and the declared size of every response is checked before its body is read.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from nufed.flower.internals import (
    Objects,
    Replies,
    children_of,
    inflate,
    kind_of,
    pull_objects,
    replies_at,
)

# the types of objects at each level of a message's tree; the chunks of arrays are the last level
RECORDS = {"ArrayRecord", "ConfigRecord", "MetricRecord"}
LEVELS = ({"Message"}, {"RecordDict"}, RECORDS, {"Array"})
CHUNK = "ArrayChunk"
RESPONSE_OVERHEAD = 64  # bytes of a response beside the object's content
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
    replies = replies_at(grid, _check_declared_size)
    if replies is None:
        return list(grid.pull_messages([message_id]))
    with _Budget(limit.records, "the ids of its objects").limits_responses():
        arrived = replies.to(message_id)
    return [_pull(replies, reply, limit) for reply in arrived]


def _pull(replies: Replies, root: str, limit: ReplyLimit) -> Message:
    """Pull and assemble the message ``root``, and delete it at the SuperLink."""
    try:
        records = _Budget(limit.records, "its records")
        contents: Objects = {}
        level = Counter([root])
        for kinds in LEVELS:
            pulled = _pull_level(level, lambda id: records.pull(replies.pull, id), kinds)
            contents |= pulled
            level = sum(map(children_of, pulled.values()), Counter())
        arrays = _Budget(limit.arrays, "its arrays")
        chunks = level
        contents |= _pull_level(
            chunks, lambda id: arrays.pull(replies.pull, id, chunks[id]), {CHUNK}
        )
    finally:
        replies.delete(root)
    return inflate(root, contents)


def _pull_level(ids: Iterable[str], pull: Callable[[str], bytes], kinds: set[str]) -> Objects:
    """The contents of these objects, which must be of the given types."""
    contents = pull_objects(list(ids), pull)
    for kind in map(kind_of, contents.values()):
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
