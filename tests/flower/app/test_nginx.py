"""The reference nginx in front of a SuperLink: sites can train, but runs can't be started."""

import http.client
import json
import os
import re
import shutil
import ssl
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.proto.message_pb2 import PushObjectRequest

from flower.ops.small_app import files_of, simulate, write_app
from nufed.flower.ops.approvals import read_app
from nufed.flower.ops.flower_processes import flower, free_ports, wait
from nufed.flower.ops.keys import make_authority, make_site_key
from nufed.flower.ops.link import Link
from nufed.flower.ops.registration import Admission, register_site
from nufed.flower.ops.site_runner import SiteOptions, site_command
from nufed.flower.ops.submit import follow
from nufed.flower.ops.superlink import is_listening, start_superlink
from processes import PATIENCE

CONFIG = Path(__file__).parents[3] / "examples" / "federation" / "nginx.conf"
NGINX = shutil.which("nginx", path=os.pathsep.join((os.environ["PATH"], "/usr/sbin")))
TIMEOUT = PATIENCE
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),  # the first test waits for all processes to import torch
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed here"),
]
CONTROL = "/v1/control/list-runs"
SIGNED = "/v1/fleet/push-object"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A SuperLink on loopback with TLS and keys, and two sites that connect through nginx."""
    folder = tmp_path_factory.mktemp("nginx")
    make_authority(folder)
    port, front = free_ports(2)
    text = CONFIG.read_text()
    assert text.count("listen 443 ssl;") == text.count("server 127.0.0.1:8000;") == 1
    text = text.replace("listen 443 ssl;", f"listen 127.0.0.1:{front} ssl;")
    text = text.replace("server 127.0.0.1:8000;", f"server 127.0.0.1:{port};")
    (folder / "nginx.conf").write_text(text)
    with flower() as commands, ExitStack() as at_end:
        superlink, direct = start_superlink(
            commands, "127.0.0.1", port, folder, folder / "link.log"
        )
        nginx = commands.start(
            *(NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")),
            *("-e", "error.log", "-g", as_this_user("daemon off;")),
            log=folder / "nginx.log",
        )
        at_end.callback(nginx.terminate)
        assert wait(lambda: is_listening("127.0.0.1", front), TIMEOUT)
        through = Link(f"127.0.0.1:{front}", direct.ca)
        direct.connect(commands)
        app = write_app(folder / "app", sites=2, rounds=2, wait=200.0)
        for number in range(2):
            public = make_site_key(folder / f"site-{number}")
            register_site(folder, number, f"site-{number}", public)
        Admission(direct, commands.home, folder / "sites.toml", say=print).apply()
        for number in range(2):
            site = SiteOptions(number, folder / f"site-{number}", folder=folder)
            site.approvals.add(read_app(app))
            commands.start(*site_command(site, through), log=folder / f"{number}.log")
        yield SimpleNamespace(
            folder=folder,
            app=app,
            link=port,
            superlink=superlink.pid,
            front=front,
            commands=commands,
            direct=direct,
            through=through,
        )


def as_this_user(directives):
    """nginx started by root runs as nobody, who can't access the test's folder."""
    return directives + (" user root;" if os.geteuid() == 0 else "")


def post(federation, port, path, method="POST", body=b""):
    """The status of a request whose path is sent unmodified."""
    trust = ssl.create_default_context(cafile=federation.folder / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=60)
    connection.request(method, path, body, {"Content-Type": "application/protobuf"})
    status = connection.getresponse().status
    connection.close()
    return status


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
def test_nothing_else_is_forwarded(federation, path):
    assert post(federation, federation.front, path) in (301, 403)


def test_a_path_that_nginx_normalises_to_the_fleets_is_forwarded_normalised(federation):
    # unsigned: 401 is the Fleet API's own response
    detour = "/v1/control/../fleet/pull-messages"
    assert post(federation, federation.front, "/v1/fleet/pull-messages") == 401
    assert post(federation, federation.front, detour) == 401
    assert post(federation, federation.front, "/v1/fleet/pull-messages", "GET") == 403


def test_the_largest_object_that_flower_sends_fits_and_more_is_refused(federation):
    path, chunk = "/v1/fleet/push-object", bytes(FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)
    for content, status in ((chunk, 401), (2 * chunk, 413)):
        body = PushObjectRequest(object_content=content).SerializeToString()
        assert post(federation, federation.front, path, body=body) == status


def begun(federation, declared, source="127.0.0.1"):
    """A connection on which a request has begun: its body of a declared size is not sent yet."""
    trust = ssl.create_default_context(cafile=federation.folder / "ca.crt")
    connection = http.client.HTTPSConnection(
        "127.0.0.1", federation.front, context=trust, timeout=60, source_address=(source, 0)
    )
    connection.putrequest("POST", "/v1/fleet/push-object")
    connection.putheader("Content-Type", "application/protobuf")
    connection.putheader("Content-Length", str(declared))
    connection.endheaders()
    return connection


def test_a_gigabyte_is_refused_by_its_declared_size(federation):
    connection = begun(federation, 2**30)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_of_undeclared_size_is_refused_at_the_same_limit(federation):
    chunks = (bytes(2**20) for _ in range(16))  # sent with Transfer-Encoding: chunked
    assert post(federation, federation.front, SIGNED, body=chunks) == 413


def resident(pid):
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def answer(connection):
    """The status of the response that has arrived; None: there is none yet."""
    connection.sock.settimeout(0.1)
    try:
        return connection.getresponse().status
    except TimeoutError:
        connection.sock.settimeout(60)
        return None


def test_strangers_occupy_little_memory_at_the_proxy_and_none_at_the_server(federation):
    """120 requests of 8 MB whose last byte never comes: 16 are read of an address, 64 in total."""
    body = PushObjectRequest(object_content=bytes(8 * 10**6)).SerializeToString()
    before = resident(federation.superlink)
    connections = []
    try:
        for host in range(2, 8):
            connections.extend(begun(federation, len(body), f"127.0.0.{host}") for _ in range(20))
        time.sleep(3)
        answers = [answer(connection) for connection in connections]
        assert set(answers) == {503, None}
        assert max(answers[at : at + 20].count(None) for at in range(0, 120, 20)) <= 16
        assert 40 < answers.count(None) <= 64
        for connection in (c for c, status in zip(connections, answers, strict=True) if not status):
            connection.send(body[:-1])
        assert resident(federation.superlink) - before < 50 * 2**20
    finally:
        for connection in connections:
            connection.close()
    # complete, but not signed: one after the other
    assert wait(lambda: post(federation, federation.front, SIGNED, body=body) == 401, TIMEOUT)
    for _ in range(20):
        assert post(federation, federation.front, SIGNED, body=body) == 401
    assert resident(federation.superlink) - before < 400 * 2**20


def test_flwr_starts_and_lists_runs_on_loopback_only(federation):
    federation.through.connect(federation.commands)
    try:
        for command in (("list", "nufed"), ("run", str(federation.app), "nufed")):
            code, printed = federation.commands.call("flwr", *command)
            assert code, printed
    finally:
        federation.direct.connect(federation.commands)
    code, printed = federation.commands.call("flwr", "list", "nufed", "--format", "json")
    assert code == 0 and json.loads(printed)["runs"] == []


def test_sites_with_keys_train_through_nginx_to_the_simulators_files(federation):
    out, said = federation.folder / "run", []
    follow(federation.commands, federation.app, out, said.append, "again")
    simulate(federation.app, federation.folder / "simulated")
    assert files_of(out) == files_of(federation.folder / "simulated"), said
    calls = (federation.folder / "access.log").read_text()
    assert "POST /v1/fleet/push-object" in calls
