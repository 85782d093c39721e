"""A site's connection to its server: takes messages, has the app answer them, sends the replies.

It does the work of Flower's SuperNode, over the same API of the server. A SuperNode serves an HTTP
API on loopback to the processes of its apps, which every user of the machine can use, and starts
such a process for every message; this one listens nowhere and forks (:mod:`.app_process`).

Run by :mod:`nufed.flower.ops.site_runner` as ``python -m nufed.flower.ops.site_process JSON``, with
the fields of :class:`Connection`. It exits with 0 once the server has forgotten it or on SIGTERM,
and with 1 if it can't connect; why is logged only if it differs from the last try.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from io import StringIO
from logging import getLogger
from pathlib import Path
from types import FrameType

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Error, Message, RecordDict
from flwr.cli.install import install_from_fab
from flwr.common.config import get_fused_config_from_fab
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from nufed.errors import InputError
from nufed.flower.app.site import default_folder
from nufed.flower.logs import log_to_stderr
from nufed.flower.ops.app_process import AppProcess, Objects, deflate
from nufed.flower.ops.approvals import Approvals, bundle_digest
from nufed.flower.ops.site_runner import Health, RefusedConnection, health_file

LOG = getLogger("nufed")
DIED = "the app's process died; see the site's log"
MIN_PAUSE, MAX_PAUSE = 0.3, 3.0  # seconds between two polls; a SuperNode's is 3
PAUSE_SHARE = 0.05  # of the time since the last message


@dataclass(frozen=True)
class Connection:
    """What a site's process needs; paths as text.

    Without ``ca`` there is no encryption, and without ``approved``, the folder of the apps that the
    site has approved, it runs any app.
    """

    server: str
    ca: str | None
    key: str | None
    approved: str | None
    node_config: dict[str, str | int | float]


@dataclass(frozen=True)
class Fleet:
    """Flower's calls of a server's API for sites, in its order."""

    node: int
    receive: Callable[[], tuple[Message, ObjectTree] | None]
    send: Callable[[Message, ObjectTree, float], tuple[set[str], str]]
    get_run: Callable[[int], Run]
    get_fab: Callable[[str, int], Fab]
    pull_object: Callable[[int, str], bytes]
    push_object: Callable[[int, str, str, bytes], None]
    confirm: Callable[[int, str], None]


class SiteProcess:
    """Answers the messages of a server, one at a time."""

    def __init__(
        self,
        fleet: Fleet,
        apps: AppProcess,
        config: dict[str, str | int | float],
        home: Path,
        health: Health,
        approvals: Approvals | None = None,
    ) -> None:
        self._fleet, self._apps, self._config, self._home = fleet, apps, config, home
        self._health, self._approvals = health, approvals
        self._run: tuple[int, Path, Context] | None = None  # the last message's
        self._objects: Objects = {}  # the last message's: a model that is sent again is not pulled

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
        with suppress(RunNotRunningException):
            received = self._fleet.receive()
        self._health.polled()
        if received is None:
            return False
        try:
            with self._health.working():
                self._answer(*received)
        except RunNotRunningException:
            LOG.info("the run has ended; its message is ignored")
        except Exception:
            LOG.exception("a message could not be answered")
        return True

    def _answer(self, message: Message, tree: ObjectTree) -> None:
        run = message.metadata.run_id
        try:
            folder, context = self._app_of(run)
        except InputError as refusal:
            LOG.warning("this site %s", refusal)
            self._fleet.confirm(run, message.metadata.message_id)
            self._reply(*deflate(_failure(message, ErrorCode.INVALID_FAB, refusal)))
            return
        wanted = [each.object_id for each in iterate_object_tree(tree)]
        known = {id: self._objects[id] for id in wanted if id in self._objects}
        new = [id for id in dict.fromkeys(wanted) if id not in known]
        self._objects = known | pull_objects(new, lambda id: self._fleet.pull_object(run, id))
        self._fleet.confirm(run, message.metadata.message_id)
        began = time.monotonic()
        answer = self._apps.answer(folder, context, tree, self._objects)
        if answer is None:
            failure = _failure(message, ErrorCode.CLIENT_APP_CRASHED, RuntimeError(DIED))
            answer = (*deflate(failure), context)
        proto, reply_tree, replied, context = answer
        self._run = run, folder, context
        self._reply(proto, reply_tree, replied, time.monotonic() - began)

    def _reply(
        self, proto: MessageProto, tree: ObjectTree, objects: Objects, seconds: float = 0.0
    ) -> None:
        reply = message_from_proto(proto)
        ids, session = self._fleet.send(reply, tree, seconds)
        push_object_contents_from_iterable(
            ((id, objects[id]) for id in ids),
            lambda id, content: self._fleet.push_object(
                reply.metadata.run_id, session, id, content
            ),
        )

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
        with redirect_stdout(StringIO()):  # it prints a line, which is none of the log's
            folder = install_from_fab(fab.content, self._home / digest, skip_prompt=True)
        context = Context(
            run_id=run,
            node_id=self._fleet.node,
            node_config=dict(self._config),
            state=RecordDict(),
            run_config=get_fused_config_from_fab(fab.content, replace(about, override_config={})),
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
    keys, ca = None, None
    if connection.key is not None:
        private = load_ssh_private_key(Path(connection.key).read_bytes(), None)
        assert isinstance(private, EllipticCurvePrivateKey)
        keys = private, private.public_key()
    if connection.ca is not None:
        ca = Path(connection.ca).read_bytes()
    home = Path(os.environ["FLWR_HOME"]) / "apps"
    with http_request_response(connection.server, ca is None, ca, keys) as calls:
        fleet = Fleet(*calls)
        connected()
        LOG.info("connected to %s", connection.server)
        approvals = Approvals(Path(connection.approved)) if connection.approved else None
        config = connection.node_config
        folder = Path(str(config.get("folder", default_folder())))
        health = Health(health_file(folder, int(config["partition-id"])))
        with health.shown():
            SiteProcess(fleet, apps, config, home, health, approvals).work()


def _failure(message: Message, code: int, error: Exception) -> Message:
    """An error reply, in the form in which Flower reports exceptions."""
    return Message(Error(code, f"{type(error)}:<'{error}'>"), reply_to=message)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()
