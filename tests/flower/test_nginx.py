"""The reference nginx in front of a SuperLink: sites work through it, nobody starts runs there."""

import http.client
import json
import os
import shutil
import ssl
import subprocess
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
import torch
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.proto.message_pb2 import PushObjectRequest
from safetensors.torch import load_file

from flower.in_memory import agents_data
from flower.test_loopback import (
    APP,
    BIN,
    LONGEST,
    PROJECT,
    TESTS,
    free_ports,
    listens,
    logs,
    plan,
    processes,
)
from flower.test_parity import simulated
from nufed.flower import SETTINGS
from processes import wait_for

CONFIG = TESTS.parent / "examples" / "federation" / "nginx.conf"
PATHS = os.pathsep.join((str(BIN), os.environ["PATH"], "/usr/sbin"))
TOOLS = {name: shutil.which(name, path=PATHS) for name in ("nginx", "openssl", "ssh-keygen")}
MISSING = [name for name, path in TOOLS.items() if path is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed here: {', '.join(MISSING)}"),
]
CONTROL = "/v1/control/list-runs"


def run(*command, **more):
    """The end of a command that must not wait for input."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LONGEST, **more
    )


def make_keys(folder):
    """One certificate for all, which is its own authority, and the key of a site each."""
    made = run(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        *("-keyout", folder / "server.key", "-out", folder / "server.crt"),
    )
    assert made.returncode == 0, made.stderr
    for copy in ("ca.crt", "public.crt"):
        shutil.copy(folder / "server.crt", folder / copy)
    shutil.copy(folder / "server.key", folder / "public.key")
    for number in range(2):
        key = folder / f"site-{number}"
        assert run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A SuperLink on loopback with TLS and keys, nginx before it, and two sites that go there."""
    folder = tmp_path_factory.mktemp("nginx")
    home, app = folder / "home", folder / "app"
    for each in (home, app / "loopback"):
        each.mkdir(parents=True)
    make_keys(folder)
    link, front, *nodes = free_ports(4)
    text = CONFIG.read_text()
    assert text.count("listen 443 ssl;") == text.count("server 127.0.0.1:8000;") == 1
    text = text.replace("listen 443 ssl;", f"listen 127.0.0.1:{front} ssl;")
    text = text.replace("server 127.0.0.1:8000;", f"server 127.0.0.1:{link};")
    (folder / "nginx.conf").write_text(text)
    (home / "config.toml").write_text(
        "".join(
            f'[superlink.{name}]\naddress = "127.0.0.1:{port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
            for name, port in (("direct", link), ("front", front))
        )
    )
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "loopback" / "__init__.py").touch()
    (app / "loopback" / "app.py").write_text(APP.format(out=folder))
    environment = {
        **os.environ,
        **SETTINGS,
        "FLWR_HOME": str(home),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent / "src"))),
        "PATH": PATHS,
    }

    def flwr(*arguments):
        return run(str(BIN / "flwr"), *arguments, env=environment)

    with processes(folder, environment) as start, ExitStack() as at_end:
        superlink = start(
            "superlink",
            *("flower-superlink", "--port", str(link), "--enable-supernode-auth"),
            *("--ssl-ca-certfile", str(folder / "ca.crt")),
            *("--ssl-certfile", str(folder / "server.crt")),
            *("--ssl-keyfile", str(folder / "server.key")),
        )
        nginx = start(
            "front",
            *(TOOLS["nginx"], "-p", str(folder), "-c", str(folder / "nginx.conf")),
            *("-e", "error.log", "-g", as_this_user("daemon off;")),
        )
        at_end.callback(
            nginx.terminate
        )  # it writes over its environment, by which others are found
        started = [superlink, nginx]

        def ended():
            return any(process.poll() is not None for process in started)

        wait_for(lambda: (listens(link) and listens(front)) or ended(), LONGEST)
        assert not ended(), logs(folder)
        for number, port in enumerate(nodes):
            key = folder / f"site-{number}"
            registered = flwr("supernode", "register", f"{key}.pub", "direct")
            assert registered.returncode == 0, registered.stdout + registered.stderr
            started.append(
                start(
                    f"site-{number}",
                    *("flower-supernode", "--superlink", f"127.0.0.1:{front}"),
                    *("--root-certificates", str(folder / "ca.crt")),
                    *("--auth-supernode-private-key", str(key), "--port", str(port)),
                    *("--node-config", f"partition-id={number}"),
                )
            )
        yield SimpleNamespace(
            folder=folder, app=app, link=link, front=front, flwr=flwr, ended=ended
        )


def as_this_user(directives):
    """nginx started by root works as nobody, who may not enter the folder of a test."""
    return directives + (" user root;" if os.geteuid() == 0 else "")


def post(federation, port, path, method="POST", body=b""):
    """The status of a bare request, its path sent as it is."""
    trust = ssl.create_default_context(cafile=federation.folder / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=60)
    connection.request(method, path, body, {"Content-Type": "application/protobuf"})
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.timeout(600)  # the first test waits for all processes, and they import torch
def test_a_raw_call_of_the_control_api_works_on_loopback_and_is_refused_through_nginx(federation):
    assert post(federation, federation.link, CONTROL) == 200
    assert post(federation, federation.front, CONTROL) == 403


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/openapi.json",
        "/health",
        "/v1/runtime/acquire-task",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/..%2fcontrol/list-runs",
        "//v1//control//list-runs",
        "/V1/control/list-runs",
        "/v1/fleet",
    ],
)
def test_nothing_else_is_let_through(federation, path):
    assert post(federation, federation.front, path) in (301, 403)


def test_a_path_that_nginx_takes_for_the_fleets_is_sent_on_as_such(federation):
    # signed by nobody: 401 is the Fleet API's own answer
    detour = "/v1/control/../fleet/pull-messages"
    assert post(federation, federation.front, "/v1/fleet/pull-messages") == 401
    assert post(federation, federation.front, detour) == 401
    assert post(federation, federation.front, "/v1/fleet/pull-messages", "GET") == 403


def test_the_largest_object_that_flower_sends_fits_and_more_is_refused(federation):
    path, chunk = "/v1/fleet/push-object", bytes(FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)
    for content, status in ((chunk, 401), (2 * chunk, 413)):
        body = PushObjectRequest(object_content=content).SerializeToString()
        assert post(federation, federation.front, path, body=body) == status


def test_flwr_starts_and_lists_runs_on_loopback_only(federation):
    for command in (("list", "front"), ("run", str(federation.app), "front")):
        refused = federation.flwr(*command)
        assert refused.returncode != 0, refused.stdout
    listed = federation.flwr("list", "direct", "--format", "json")
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert json.loads(listed.stdout)["runs"] == []


@pytest.mark.timeout(600)
def test_sites_with_keys_train_through_nginx_to_the_simulators_model(federation):
    begun = federation.flwr("run", str(federation.app), "direct")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    scores = federation.folder / "scores.json"
    with suppress(AssertionError):  # the next one shows what happened
        wait_for(lambda: scores.exists() or federation.ended(), 2 * LONGEST)
    assert scores.exists(), logs(federation.folder)
    right, _ = simulated(plan(), agents_data(2))
    model = load_file(federation.folder / "model.safetensors")["model"]
    assert torch.equal(model, right[-1].server["model"])
    calls = (federation.folder / "access.log").read_text()
    assert "POST /v1/fleet/push-object" in calls
