"""A site's connection to its server: takes messages, has the app answer them, sends the replies.

It does the work of Flower's SuperNode, over the same API of the server. A SuperNode serves an HTTP
API on loopback to the processes of its apps, which every user of the machine can use, and starts
such a process for every message; this one listens nowhere, and forks for every message a process
that has imported torch and nufed. The fork gets the message over a socket that only it and its site
hold: it has no network connection to the server, and nothing of it listens. If it dies, the site
continues.

Run by :mod:`nufed.flower.ops.site_runner` as ``python -m nufed.flower.ops.site_process JSON``, with
the fields of :class:`Connection`. It exits with 0 once the server no longer knows it or on SIGTERM,
and with 1 if it can't connect; why is logged only if it differs from the last try.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedRWPair
from logging import getLogger
from pathlib import Path
from types import FrameType

import numpy as np
from flwr.app import Context, Message, RecordDict

from nufed.errors import InputError
from nufed.flower import internals
from nufed.flower.app.signatures import private_key
from nufed.flower.app.site import default_folder
from nufed.flower.logs import log_to_stderr
from nufed.flower.ops.approvals import Approvals, bundle_digest
from nufed.flower.ops.site_runner import Health, RefusedConnection, health_file

LOG = getLogger("nufed")
DIED = "the app's process died; see the site's log"
MIN_PAUSE, MAX_PAUSE = 0.3, 3.0  # seconds between two polls; a SuperNode's is 3
PAUSE_SHARE = 0.05  # of the time since the last message
_DIE_WITH_PARENT = 1  # prctl(PR_SET_PDEATHSIG)


@dataclass(frozen=True)
class Connection:
    """The settings of a site's process; paths as text.

    Without ``ca`` there is no encryption, and without ``approved``, the folder of the apps that the
    site has approved, it runs any app.
    """

    server: str
    ca: str | None
    key: str | None
    approved: str | None
    node_config: dict[str, str | int | float]


class SiteProcess:
    """Answers the messages of a server, one at a time."""

    def __init__(
        self,
        fleet: internals.Fleet,
        apps: AppProcess,
        config: dict[str, str | int | float],
        home: Path,
        health: Health,
        approvals: Approvals | None = None,
    ) -> None:
        self._fleet, self._apps, self._config, self._home = fleet, apps, config, home
        self._health, self._approvals = health, approvals
        self._run: tuple[int, Path, Context] | None = None  # the last message's
        # the last message's: a model that is sent again is not pulled
        self._objects: internals.Objects = {}

    def work(self) -> None:
        """Answer messages until the connection ends; polls less often the longer it waits."""
        last = time.monotonic()
        while True:
            if self.answer_next():
                last = time.monotonic()
            else:
                waited = time.monotonic() - last
                time.sleep(min(max(MIN_PAUSE, PAUSE_SHARE * waited), MAX_PAUSE))

    def answer_next(self) -> bool:
        """Answer a message, if there is one; a message that can't be answered is logged."""
        received = None
        with suppress(internals.RunNotRunningException):
            received = self._fleet.receive()
        self._health.polled()
        if received is None:
            return False
        try:
            with self._health.working():
                self._answer(*received)
        except internals.RunNotRunningException:
            LOG.info("the run has ended; its message is ignored")
        except Exception:
            LOG.exception("a message could not be answered")
        return True

    def _answer(self, message: Message, tree: internals.ObjectTree) -> None:
        run = message.metadata.run_id
        try:
            folder, context = self._app_of(run)
        except InputError as refusal:
            LOG.warning("this site %s", refusal)
            self._fleet.confirm(run, message.metadata.message_id)
            self._fleet.reply(
                *internals.deflate(_failure(message, internals.ErrorCode.INVALID_FAB, refusal)), 0.0
            )
            return
        wanted = internals.ids_of(tree)
        known = {id: self._objects[id] for id in wanted if id in self._objects}
        new = [id for id in dict.fromkeys(wanted) if id not in known]
        self._objects = known | internals.pull_objects(
            new, lambda id: self._fleet.pull_object(run, id)
        )
        self._fleet.confirm(run, message.metadata.message_id)
        began = time.monotonic()
        answer = self._apps.answer(folder, context, tree, self._objects)
        if answer is None:
            failure = _failure(message, internals.ErrorCode.CLIENT_APP_CRASHED, RuntimeError(DIED))
            answer = (*internals.deflate(failure), context)
        proto, reply_tree, replied, context = answer
        self._run = run, folder, context
        self._fleet.reply(proto, reply_tree, replied, time.monotonic() - began)

    def _app_of(self, run: int) -> tuple[Path, Context]:
        """The installed app of a run, and the context that it left; InputError: not approved."""
        if self._run is not None and self._run[0] == run:
            return self._run[1:]
        about = self._fleet.get_run(run)
        fab = self._fleet.get_fab(about.fab_hash, run)
        try:
            digest = bundle_digest(fab.content)
        except InputError as error:
            raise InputError(f"refuses this app: {error}") from None
        if self._approvals is not None and (refusal := self._approvals.refusal(fab.content)):
            raise InputError(refusal)
        folder = internals.install_app(fab.content, self._home / digest)
        context = Context(
            run_id=run,
            node_id=self._fleet.node,
            node_config=dict(self._config),
            state=RecordDict(),
            run_config=internals.app_config(fab.content, about),
            series_id=about.series_id,
        )
        return folder, context


def main() -> None:
    """Connect, and work until the connection ends."""
    connection = Connection(**json.loads(sys.argv[1]))
    log_to_stderr(connection.node_config.get("log-format", "text"))
    signal.signal(signal.SIGTERM, _end)
    apps = AppProcess()
    try:
        with RefusedConnection(Path(os.environ["FLWR_HOME"]) / "refused").logged_once() as refused:
            _connect(connection, apps, refused.clear)
    finally:
        apps.close()


def _connect(connection: Connection, apps: AppProcess, connected: Callable[[], None]) -> None:
    private = private_key(Path(connection.key)) if connection.key else None
    ca = Path(connection.ca).read_bytes() if connection.ca else None
    home = Path(os.environ["FLWR_HOME"]) / "apps"
    with internals.fleet_api(connection.server, ca, private) as fleet:
        connected()
        LOG.info("connected to %s", connection.server)
        approvals = Approvals(Path(connection.approved)) if connection.approved else None
        config = connection.node_config
        folder = Path(str(config.get("folder", default_folder())))
        health = Health(health_file(folder, int(config["partition-id"])))
        with health.shown():
            SiteProcess(fleet, apps, config, home, health, approvals).work()


def _failure(message: Message, code: int, error: Exception) -> Message:
    return Message(internals.app_error(error, code), reply_to=message)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


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
        self, app: Path, context: Context, tree: internals.ObjectTree, objects: internals.Objects
    ) -> tuple[internals.MessageProto, internals.ObjectTree, internals.Objects, Context] | None:
        """The app's reply, its objects, and the context after it; None if the process died."""
        ours, theirs = socket.socketpair()
        with ours, ours.makefile("rwb") as stream:
            with theirs:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
            try:
                request = internals.context_to_bytes(context), tree.SerializeToString()
                write_parts(stream, [str(app).encode(), *request, *_parts(objects)])
                reply = read_parts(stream)
            except (OSError, EOFError):
                return None
        message, reply_tree, after, *contents = reply
        return (
            internals.MessageProto.FromString(message),
            internals.ObjectTree.FromString(reply_tree),
            _objects(contents),
            internals.context_from_bytes(after),
        )

    def close(self) -> None:
        """End it, and the process of a message that it is answering."""
        self._control.close()
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def import_early() -> None:
    """Import once, and not in the fork of every message, what handling a message imports."""
    import torch.fx.experimental.symbolic_shapes  # noqa: F401 (by a first Hessian-vector product)

    import nufed.flower.app.apps  # noqa: F401


def _fork_for_each(control: socket.socket) -> None:
    """Fork for every message that the site announces, until the site closes its end."""
    _end_with_parent()
    import_early()
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
                with socket.socket(fileno=fds[0]) as link, link.makefile("rwb") as stream:
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
    tree, objects = internals.ObjectTree.FromString(tree_bytes), _objects(contents)
    context = internals.context_from_bytes(context_bytes)
    message = internals.inflate(tree.object_id, objects)
    internals.set_identity(context)
    try:
        reply = internals.load_client_app(Path(app.decode()))(message=message, context=context)
    except Exception as error:
        LOG.exception("the app raised an exception")
        reply = Message(internals.app_error(error), reply_to=message)
    bare, reply_tree, objects = internals.deflate(reply)
    about = (
        bare.SerializeToString(),
        reply_tree.SerializeToString(),
        internals.context_to_bytes(context),
    )
    return [*about, *_parts(objects)]


def _parts(objects: internals.Objects) -> list[bytes]:
    return [json.dumps(list(objects)).encode(), *objects.values()]


def _objects(parts: Sequence[bytes]) -> internals.Objects:
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


if __name__ == "__main__":
    main()
