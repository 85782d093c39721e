"""What other users of a machine, and a server's operator with another app, can do: nothing."""

import http.client
import json
import os
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from flower.ops.small_app import write_app
from nufed.errors import TrainingError
from nufed.flower.ops.approvals import read_app
from nufed.flower.ops.flower_processes import flower, free_ports
from nufed.flower.ops.keys import make_authority, make_site_key
from nufed.flower.ops.registration import Admission, register_site
from nufed.flower.ops.site_runner import SiteOptions, site_command
from nufed.flower.ops.submit import follow
from nufed.flower.ops.superlink import start_superlink
from nufed.lab.runs.federation_records import read_status
from processes import can_become

NOBODY = 65534
REQUESTS = [
    "/v1/control/list-runs",
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/runtime/acquire-task",
    "/v1/runtime/get-nodes",
    "/v1/runtime/push-messages",
    "//v1/control/list-runs",
    "/v1/fleet/../control/list-runs",
]
NO_ROUTE = REQUESTS[-2:]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not can_become(NOBODY), reason="only root can become another user"),
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    place = tmp_path_factory.mktemp("federation")
    place.chmod(0o755)
    make_authority(place / "keys", days=1)
    app = write_app(place / "app", sites=2, rounds=3, wait=200.0)
    with flower() as commands:
        (port,) = free_ports(1)
        _, link = start_superlink(commands, "127.0.0.1", port, place / "keys", place / "link.log")
        link.connect(commands)
        members = [
            SiteOptions(number, place / name, name, folder=place / f"{name}-state")
            for number, name in enumerate(("site-0", "site-1"))
        ]
        for site in members:
            register_site(place / "keys", site.number, site.name, make_site_key(site.key))
            site.approvals.add(read_app(app))
        Admission(link, commands.home, place / "keys" / "sites.toml", say=print).apply()
        sites = [
            commands.start(*site_command(site, link), log=place / f"{site.name}.log")
            for site in members
        ]
        yield SimpleNamespace(commands=commands, port=port, place=place, app=app, sites=sites)


def as_nobody(function, *arguments):
    """The result of a function, called in a process of another user."""
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writable, json.dumps(function(*arguments)).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as file:
        result = json.loads(file.read())
    os.waitpid(pid, 0)
    return result


def statuses(port, headers):
    found = {}
    for path in REQUESTS:
        link = http.client.HTTPSConnection(
            "127.0.0.1", port, context=ssl._create_unverified_context()
        )
        link.request("POST", path, b"", {"content-type": PROTOBUF_MEDIA_TYPE, **headers})
        found[path] = link.getresponse().status
        link.close()
    return found


def readable_files(paths):
    found = []
    for path in paths:
        try:
            Path(path).read_bytes()
        except OSError:
            continue
        found.append(path)
    return found


def commands_of(federation):
    """The command lines of all processes that were started, by process."""
    found = {}
    for pid in federation.commands.alive():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found[pid] = [word.decode() for word in words]
    return found


def listening(pids):
    """The sockets on which these processes listen; forks of apps may have ended."""
    inodes, found = set(), []
    for name, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        lines = [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()]
        inodes |= {f"socket:[{line[9]}]" for line in lines[1:] if line[3] == state}
    for pid in pids:
        with suppress(OSError):
            found += [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
    assert found
    return inodes & set(found)


def test_another_user_can_neither_use_the_server_nor_a_site(federation):
    out, seen, said = federation.place / "run", {}, []

    def look():
        running = commands_of(federation)
        seen.update(running)
        if any("flwr-serverapp" in words[1] for words in running.values() if len(words) > 1):
            sites = [pid for pid, words in running.items() if "site_process" in " ".join(words)]
            assert len(sites) >= 2 and not listening(sites)
            with socket.create_connection(("127.0.0.1", federation.port)) as own:
                # claims to be this connection of the server's own user
                spoofed = {"x-forwarded-for": f"127.0.0.1:{own.getsockname()[1]}"}
                for headers in ({}, spoofed):
                    answered = as_nobody(statuses, federation.port, headers)
                    assert {answered.pop(path) for path in NO_ROUTE} <= {403, 404}
                    assert set(answered.values()) == {403}
            tokens = [
                word.replace("self", str(pid))
                for pid, words in running.items()
                for word in words
                if word.startswith("/proc/self/fd/")
            ]
            assert tokens and as_nobody(readable_files, tokens) == []

    follow(federation.commands, federation.app, out, said.append, "", look)
    assert (out / "report.html").is_file(), said
    words = [word for command in seen.values() for word in command]
    assert "--token-file" in words and "--token" not in words
    # and the server's own user can
    assert statuses(federation.port, {})["/v1/control/list-runs"] == 200


def test_an_app_that_the_sites_have_not_approved_never_runs_there(federation):
    marker = federation.place / "marker"
    other = write_app(federation.place / "other", sites=2, rounds=3, wait=10.0)
    code = f"import os\nopen({str(marker)!r} + str(os.getpid()), 'w').close()\n"
    (other / "app.py").write_text(code + (other / "app.py").read_text())
    out, said, seen = federation.place / "refused", [], {}
    why = r"0 of 2 sites take part .*site 0 \(site-0\).*: it has not approved this app \(digest "
    with pytest.raises(TrainingError, match=why):
        follow(
            federation.commands,
            other,
            out,
            said.append,
            "",
            lambda: seen.update(commands_of(federation)),
        )
    ran = {int(path.name.removeprefix("marker")) for path in federation.place.glob("marker*")}
    servers = {pid for pid, words in seen.items() if "flwr-serverapp" in " ".join(words)}
    assert ran and ran <= servers  # the operator's own process only
    assert "has not approved this app (digest " in (out / "log.txt").read_text()
    for site in read_status(out).sites:  # as `nufed federate status` shows it
        assert site.connected and not site.joined
        assert site.excluded.startswith("it has not approved this app (digest ")
    assert all(site.poll() is None for site in federation.sites)
