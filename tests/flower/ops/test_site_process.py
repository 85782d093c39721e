"""A site's process and the forks of its app, with a server that is a dictionary."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.serde import message_from_proto
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity

from flower.ops.test_approvals import digest_before, zipped
from nufed.errors import InputError
from nufed.flower.internals import Fleet, deflate, ids_of, inflate
from nufed.flower.ops.approvals import Approvals, build_bundle, bundled_files
from nufed.flower.ops.site_process import DIED, AppProcess, SiteProcess
from nufed.flower.ops.site_runner import Health

PROJECT = """
[project]
name = "small"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "us"
[tool.flwr.app.components]
serverapp = "app:app"
clientapp = "app:app"
[tool.flwr.app.config]
speed = 1
"""
APP = """
import os
import random
import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
imported = 0

@app.query()
def answer(message, context):
    global imported
    imported += 1
    word = message.content["about"]["word"]
    if word == "die":
        os._exit(3)
    if word == "raise":
        raise ValueError("no such word")
    said = context.state.get("said", ConfigRecord({"words": []}))["words"] + [word]
    context.state["said"] = ConfigRecord({"words": said})
    return Message(RecordDict({"about": ConfigRecord({
        "said": said, "imported": imported, "pid": os.getpid(), "node": context.node_config["x"],
        "speed": context.run_config["speed"], "draw": float(np.random.rand()),
    })}), reply_to=message)
"""


class Server:
    """Holds messages for a site, and its replies."""

    def __init__(self, app):
        self.fab = Fab(hashlib.sha256(app).hexdigest(), app, {})
        self.messages, self.objects, self.pulled = [], {}, []
        self.replies = []

    def ask(self, word, run=7):
        TaskIdentity.task_id = TaskIdentity.node_id = 1  # as in a ServerApp
        TaskIdentity.run_id = run
        message = Message(RecordDict({"about": ConfigRecord({"word": word})}), 5, MessageType.QUERY)
        proto, tree, objects = deflate(message)
        self.objects |= objects
        self.messages.append((message_from_proto(proto), tree))

    def run(self, id):
        fields = dict.fromkeys(Run.__dataclass_fields__, "")
        return Run(
            **fields
            | {"fab_hash": self.fab.hash_str, "series_id": 2, "override_config": {"speed": 9}}
        )

    def pull(self, run, id):
        self.pulled.append(id)
        return self.objects[id]

    def send(self, message, tree, seconds):
        self.replies.append(SimpleNamespace(message=message, tree=tree, objects={}))
        return set(ids_of(tree)), "session"

    def push(self, run, session, id, content):
        self.replies[-1].objects[id] = content

    def fleet(self):
        return Fleet(
            5,
            lambda: self.messages.pop(0) if self.messages else None,
            self.send,
            self.run,
            lambda hash, run: self.fab,
            self.pull,
            self.push,
            lambda run, id: None,
        )

    def reply(self):
        reply = self.replies.pop(0)
        return inflate(reply.tree.object_id, reply.objects)


def write_small_app(folder, code=APP):
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "app.py").write_text(code)
    return folder


@pytest.fixture
def federation(tmp_path):
    source = write_small_app(tmp_path / "small")
    server, apps = Server(build_bundle(source)), AppProcess()
    health = Health(tmp_path / "health")
    yield server, SiteProcess(server.fleet(), apps, {"x": 3}, tmp_path / "apps", health)
    apps.close()


def test_every_message_is_answered_by_a_fork_and_the_context_is_kept(federation, capsys):
    server, site = federation
    abouts = []
    for word in ("one", "two"):
        server.ask(word)
        assert site.answer_next()
        abouts.append(dict(server.reply().content["about"]))
    assert not site.answer_next()
    assert capsys.readouterr().out == ""  # what Flower prints is not in the log's format
    assert [about["said"] for about in abouts] == [["one"], ["one", "two"]]
    assert [about["imported"] for about in abouts] == [1, 1]  # a new process each
    assert abouts[0]["pid"] != abouts[1]["pid"] and abouts[0]["draw"] != abouts[1]["draw"]
    # the configuration in the app, not what whoever started the run has put in its place
    assert abouts[0]["node"] == 3 and abouts[0]["speed"] == 1
    server.ask("one", run=8)
    site.answer_next()
    assert server.reply().content["about"]["said"] == ["one"]


def test_a_fork_imports_nothing_slow():
    """Else every message costs that again."""
    code = """
import sys
from nufed.flower.ops.site_process import import_early
import_early()
before = set(sys.modules)
import torch
from nufed import Objective
from nufed.flower import App
objective = Objective(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
w, batch = objective.initial(), (torch.ones(3, 2), torch.zeros(3, 1))
objective.hvp(w, batch, objective.grad(w, batch))
slow = {name.partition(".")[0] for name in sys.modules.keys() - before}
assert not slow & {"nufed", "torch", "sympy", "flwr", "pydantic"}, slow
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_app_that_raises_or_dies_is_named_and_the_site_goes_on(federation):
    server, site = federation
    reasons = []
    for word in ("raise", "die"):
        server.ask(word)
        site.answer_next()
        reasons.append(server.reply().error.reason)
    assert reasons == [
        "<class 'ValueError'>:<'no such word'>",
        f"<class 'RuntimeError'>:<'{DIED}'>",
    ]
    server.ask("fine")
    site.answer_next()
    assert server.reply().content["about"]["said"] == ["fine"]


def test_a_site_that_polls_is_shown_as_connected(federation, tmp_path):
    _, site = federation
    site._health.update()
    assert not (tmp_path / "health").exists()
    assert not site.answer_next()
    site._health.update()
    assert (tmp_path / "health").exists()


def test_what_the_last_message_held_is_not_pulled_again(federation):
    server, site = federation
    for word in ("same", "same", "other"):
        server.ask(word)
        site.answer_next()
    message, content, record = 1, 1, 1
    assert len(server.pulled) == 3 * message + 2 * (content + record)


@pytest.mark.parametrize("error", [RunNotRunningException, OSError])
def test_a_message_that_can_not_be_pulled_is_ignored(federation, error):
    server, site = federation

    def pull(run, id):
        raise error

    server.ask("late")
    fleet, site._fleet = site._fleet, replace(site._fleet, pull_object=pull)
    assert site.answer_next() and not server.replies
    site._fleet = fleet
    server.ask("next")
    assert site.answer_next() and server.reply().content["about"]["said"] == ["next"]


def test_an_app_runs_only_once_it_is_approved(tmp_path):
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'a').write('x')\n" + APP
    bundle = build_bundle(write_small_app(tmp_path / "small", code))
    server, apps = Server(bundle), AppProcess()
    approvals = Approvals.of_site(tmp_path / "state")
    approvals.add(build_bundle(write_small_app(tmp_path / "small", APP)))
    health = Health(tmp_path / "health")
    site = SiteProcess(server.fleet(), apps, {"x": 3}, tmp_path / "apps", health, approvals)
    server.ask("one")
    assert site.answer_next()
    assert "has not approved this app (digest " in server.reply().error.reason
    assert not marker.exists() and not (tmp_path / "apps").exists() and not server.pulled
    approvals.add(bundle)
    server.ask("one")
    assert site.answer_next()
    assert server.reply().content["about"]["said"] == ["one"] and marker.exists()
    apps.close()


def test_the_approval_of_one_app_does_not_run_another(tmp_path):
    """A file's name held the line of another file in the digest: both apps had the same one."""
    marker = tmp_path / "ran"
    evil = f"open({str(marker)!r}, 'w')\n" + APP
    files = bundled_files(build_bundle(write_small_app(tmp_path / "small", evil)))
    line = f"{hashlib.sha256(evil.encode()).hexdigest()} app.py"
    harmless = {f"A.md\n{line}": b"text", "pyproject.toml": files["pyproject.toml"]}
    bundles = [zipped(own) for own in (harmless, {"A.md": b"text", **files})]
    assert digest_before(bundles[0]) == digest_before(bundles[1])
    approvals = Approvals.of_site(tmp_path / "state")
    with pytest.raises(InputError, match="control characters"):
        approvals.add(bundles[0])
    approvals.folder.mkdir(parents=True)
    old = approvals.folder / f"000001-{digest_before(bundles[0])}.fab"  # approved in the past
    old.write_bytes(bundles[0])
    health, apps = Health(tmp_path / "health"), AppProcess()
    reasons = []
    for bundle in bundles:
        server = Server(bundle)
        site = SiteProcess(server.fleet(), apps, {"x": 3}, tmp_path / "apps", health, approvals)
        server.ask("one")
        assert site.answer_next()
        reasons.append(server.reply().error.reason)
    apps.close()
    assert "refuses this app: the app's bundle has a file 'A.md\\n" in reasons[0]
    assert "has not approved this app" in reasons[1] and "do not count: approve again" in reasons[1]
    assert not marker.exists() and not (tmp_path / "apps").exists()
