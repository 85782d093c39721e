"""The sites of a server, from its registry and what its SuperLink knows of its nodes."""

import time
from datetime import UTC, datetime

import pytest
from flwr.common.constant import HEARTBEAT_PATIENCE
from flwr.proto.node_pb2 import NodeInfo

from nufed.errors import InputError, RunError
from nufed.flower.app.registry import read_sites
from nufed.flower.app.signatures import fingerprint, load_public, public_of
from nufed.flower.internals import node_of, public_key_to_bytes
from nufed.flower.ops.flower_processes import free_ports
from nufed.flower.ops.keys import make_authority, make_site_key
from nufed.flower.ops.registration import add_key, register_site
from nufed.flower.ops.status import connected_sites, sites_of_nodes

BEFORE, LATER = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def keys(tmp_path):
    for number in range(3):
        register_site(tmp_path, number, f"Ward {number}", make_site_key(tmp_path / f"{number}"))
    return tmp_path


def node(keys, name, status, **times):
    key = public_key_to_bytes(load_public(public_of(keys / name)))
    return node_of(NodeInfo(public_key=key, status=status, **times))


def test_sites_are_connected_away_or_never_came(keys):
    now = time.time()
    nodes = [
        node(
            keys, "0", "online", last_activated_at=BEFORE.isoformat(), heartbeat_interval=30.0,
            online_until=now + HEARTBEAT_PATIENCE * 30.0,
        ),
        node(
            keys, "1", "offline", last_activated_at=BEFORE.isoformat(),
            last_deactivated_at=LATER.isoformat(),
        ),
        node(keys, "2", "registered"),
    ]  # fmt: skip
    sites = sites_of_nodes(read_sites(keys / "sites.toml"), nodes)
    assert [(site.number, site.name) for site in sites] == [(n, f"Ward {n}") for n in range(3)]
    assert [site.connected for site in sites] == [True, False, False]
    assert [site.last_seen for site in sites] == [pytest.approx(now), LATER.timestamp(), None]


def test_while_a_key_is_rotated_the_one_in_use_is_shown(keys):
    add_key(keys, "1", make_site_key(keys / "new"))
    times = {"last_activated_at": BEFORE.isoformat(), "last_deactivated_at": LATER.isoformat()}
    nodes = [node(keys, "1", "offline", **times), node(keys, "new", "registered")]
    _, site, _ = sites_of_nodes(read_sites(keys / "sites.toml"), nodes)
    assert site.key == fingerprint(public_of(keys / "1"))


def test_a_server_that_does_not_run_is_named(keys, nufed):
    (port,) = free_ports(1)
    with pytest.raises(InputError, match="there is no such file"):
        connected_sites(keys, f"127.0.0.1:{port}")
    make_authority(keys / "server")
    (keys / "sites.toml").rename(keys / "server" / "sites.toml")
    with pytest.raises(RunError, match="the server's Control API can't be reached"):
        connected_sites(keys / "server", f"127.0.0.1:{port}")
    shown = nufed("federate", "status", "run", "--keys", "server", cwd=keys)
    assert shown.returncode == 2 and "--keys is instead of a run directory" in shown.stderr
