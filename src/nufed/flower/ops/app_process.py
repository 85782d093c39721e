"""Runs a site's app: a fork for every message, of a process that has imported torch and nufed.

The forked process gets the message over a socket that only it and its site hold: it has no
network connection to the server, and nothing of it listens. If it dies, the site goes on.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from io import BufferedRWPair
from logging import getLogger
from pathlib import Path

import numpy as np
from flwr.app import Context, Message

from nufed.flower.internals import (
    MessageProto,
    Objects,
    ObjectTree,
    app_error,
    context_from_bytes,
    context_to_bytes,
    deflate,
    inflate,
    load_client_app,
    set_identity,
)

LOG = getLogger("nufed")
_DIE_WITH_PARENT = 1  # prctl(PR_SET_PDEATHSIG)


class AppProcess:
    """Answers a site's messages. Start it before any thread: it forks."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            self._control.close()
            _fork_for_each(theirs)
            os._exit(0)
        theirs.close()

    def answer(
        self, app: Path, context: Context, tree: ObjectTree, objects: Objects
    ) -> tuple[MessageProto, ObjectTree, Objects, Context] | None:
        """The app's reply, its objects, and the context after it; None if the process died."""
        ours, theirs = socket.socketpair()
        with ours, ours.makefile("rwb") as stream:
            with theirs:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
            try:
                request = context_to_bytes(context), tree.SerializeToString()
                write_parts(stream, [str(app).encode(), *request, *_parts(objects)])
                reply = read_parts(stream)
            except (OSError, EOFError):
                return None
        message, reply_tree, after, *contents = reply
        return (
            MessageProto.FromString(message),
            ObjectTree.FromString(reply_tree),
            _objects(contents),
            context_from_bytes(after),
        )

    def close(self) -> None:
        """End it, and the process of a message that it is answering."""
        self._control.close()
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _fork_for_each(control: socket.socket) -> None:
    """Fork for every message that the site announces, until the site closes its end."""
    _end_with_parent()
    while True:
        mark, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not mark:
            return
        pid = os.fork()
        if not pid:
            code = 1
            try:
                control.close()
                _end_with_parent()
                np.random.seed()  # noqa: NPY002  (else every message has the same global state)
                with socket.socket(fileno=fds[0]) as own, own.makefile("rwb") as stream:
                    write_parts(stream, _respond(read_parts(stream)))
                code = 0
            finally:
                os._exit(code)
        os.close(fds[0])
        os.waitpid(pid, 0)


def _end_with_parent() -> None:
    """Die with the process that forked this one; Ctrl-C is that process's business."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _respond(request: Sequence[bytes]) -> list[bytes]:
    app, context_bytes, tree_bytes, *contents = request
    tree, objects = ObjectTree.FromString(tree_bytes), _objects(contents)
    context = context_from_bytes(context_bytes)
    message = inflate(tree.object_id, objects)
    set_identity(context)
    try:
        reply = load_client_app(Path(app.decode()))(message=message, context=context)
    except Exception as error:
        LOG.exception("the app raised an exception")
        reply = Message(app_error(error), reply_to=message)
    bare, reply_tree, objects = deflate(reply)
    about = bare.SerializeToString(), reply_tree.SerializeToString(), context_to_bytes(context)
    return [*about, *_parts(objects)]


def _parts(objects: Objects) -> list[bytes]:
    return [json.dumps(list(objects)).encode(), *objects.values()]


def _objects(parts: Sequence[bytes]) -> Objects:
    return dict(zip(json.loads(parts[0]), parts[1:], strict=True))


def write_parts(stream: BufferedRWPair, parts: Sequence[bytes]) -> None:
    """Write byte strings, preceded by their lengths."""
    stream.write(json.dumps([len(part) for part in parts]).encode() + b"\n")
    stream.writelines(parts)
    stream.flush()


def read_parts(stream: BufferedRWPair) -> list[bytes]:
    """Read what :func:`write_parts` wrote; EOFError if it is incomplete."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    parts = []
    for length in json.loads(line):
        part = stream.read(length)
        if len(part) != length:
            raise EOFError
        parts.append(part)
    return parts
