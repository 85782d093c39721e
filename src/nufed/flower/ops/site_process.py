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
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from types import FrameType

from flwr.app import Context, Message, RecordDict

from nufed.errors import InputError
from nufed.flower.app.signatures import private_key
from nufed.flower.app.site import default_folder
from nufed.flower.internals import (
    ErrorCode,
    Fleet,
    Objects,
    ObjectTree,
    RunNotRunningException,
    app_config,
    app_error,
    deflate,
    fleet_api,
    ids_of,
    install_app,
    pull_objects,
)
from nufed.flower.logs import log_to_stderr
from nufed.flower.ops.app_process import AppProcess
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
            self._fleet.reply(*deflate(_failure(message, ErrorCode.INVALID_FAB, refusal)), 0.0)
            return
        wanted = ids_of(tree)
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
        folder = install_app(fab.content, self._home / digest)
        context = Context(
            run_id=run,
            node_id=self._fleet.node,
            node_config=dict(self._config),
            state=RecordDict(),
            run_config=app_config(fab.content, about),
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
    with fleet_api(connection.server, ca, private) as fleet:
        connected()
        LOG.info("connected to %s", connection.server)
        approvals = Approvals(Path(connection.approved)) if connection.approved else None
        config = connection.node_config
        folder = Path(str(config.get("folder", default_folder())))
        health = Health(health_file(folder, int(config["partition-id"])))
        with health.shown():
            SiteProcess(fleet, apps, config, home, health, approvals).work()


def _failure(message: Message, code: int, error: Exception) -> Message:
    return Message(app_error(error, code), reply_to=message)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()
