"""Pulls replies of bounded size: a larger one is refused before its content is read.

Flower stores a message as a tree of objects (message, records, arrays, chunks of arrays), each by
the SHA-256 of its content. An array may contain one chunk many times, so that a few megabytes sent
become gigabytes once the array is assembled. ``Grid.pull_messages`` assembles everything; here
objects are pulled level by level from the root, each chunk is charged with its size times its
number of occurrences, and the declared size of every response is checked before its body is read.

This file uses internals of flwr 1.41.0 (``HttpGrid``, the object tree); nothing else does.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import httpx
from flwr.app import Array, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
)
from flwr.superlink.grid.http_grid import HttpGrid

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
    if not isinstance(grid, HttpGrid):  # in Flower's simulation replies are in memory already
        return list(grid.pull_messages([message_id]))
    client = grid._runtime_client
    hooks = client._client.event_hooks["response"]
    if _check_declared_size not in hooks:
        hooks.append(_check_declared_size)
    with _Budget(limit.records, "the ids of its objects").limits_responses():
        answer = client.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
    return [_pull(grid, proto.metadata.message_id, limit) for proto in answer.messages_list]


def _pull(grid: HttpGrid, root: str, limit: ReplyLimit) -> Message:
    """Pull and assemble the message ``root``, and delete it at the SuperLink."""
    client, run = grid._runtime_client, grid.run.run_id
    pull = make_pull_object_fn_protobuf(client.PullObject, grid.node, run)
    try:
        records = _Budget(limit.records, "its records")
        contents: dict[str, bytes] = {}
        level = Counter([root])
        for kinds in LEVELS:
            found = _pull_level(level, lambda id: records.pull(pull, id), kinds)
            contents |= found
            level = sum((_children(content) for content in found.values()), Counter())
        arrays = _Budget(limit.arrays, "its arrays")
        chunks = level
        contents |= _pull_level(chunks, lambda id: arrays.pull(pull, id, chunks[id]), {CHUNK})
    finally:
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=grid.node, run_id=run, message_object_id=root)
        )
    message = cast(Message, inflate_object_from_contents(root, contents))
    message.metadata.__dict__["_message_id"] = root  # as HttpGrid does
    return message


def _pull_level(
    ids: Iterable[str], pull: Callable[[str], bytes], kinds: set[str]
) -> dict[str, bytes]:
    """The contents of these objects, which must be of the given types."""
    contents = pull_objects(list(ids), pull)
    for content in contents.values():
        kind, _, _ = get_object_head_values_from_object_content(content)
        if kind not in kinds:
            raise ValueError(f"an object of type {kind} instead of {sorted(kinds)}")
    return contents


def _children(content: bytes) -> Counter[str]:
    """The ids of an object's children, and how often each occurs in it."""
    kind, ids, _ = get_object_head_values_from_object_content(content)
    if kind != Array.__qualname__:
        return Counter(ids)
    return Counter(ids[i] for i in json.loads(get_object_body(content, Array))["arraychunk_ids"])


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
