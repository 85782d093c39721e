"""The registered sites of a server, and which of them are connected: with or without a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from flwr.common.constant import HEARTBEAT_PATIENCE
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.constant import NodeStatus
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from nufed.flower.app.signatures import load_public
from nufed.flower.app.site_registry import SITES, SiteRegistry, read_sites
from nufed.flower.ops.control_api import control_api
from nufed.flower.ops.keys import CA
from nufed.flower.ops.link import Link, link_to


@dataclass(frozen=True)
class ConnectedSite:
    """A registered site; ``key`` is the fingerprint of the key that it used last.

    ``last_seen`` is in seconds since 1970; None: never since the server was started.
    """

    number: int
    name: str
    key: str
    connected: bool
    last_seen: float | None


def connected_sites(keys: Path, server: str) -> list[ConnectedSite]:
    """The sites in the registry of a running server, which must be this user's own."""
    registry = read_sites(keys / SITES)
    return sites_of_nodes(registry, nodes_of(link_to(server, keys / CA, insecure=False)))


def nodes_of(link: Link) -> Iterable[NodeInfo]:
    """The nodes that a SuperLink knows."""
    with control_api(link) as client:
        return list(client.ListNodes(ListNodesRequest()).nodes_info)


def sites_of_nodes(registry: SiteRegistry, nodes: Iterable[NodeInfo]) -> list[ConnectedSite]:
    """The state of every registered site, by number."""
    found: dict[int, ConnectedSite] = {}
    by_key = {node.public_key: node for node in nodes if node.status != NodeStatus.UNREGISTERED}
    for key, public, site in registry.entries():
        node = by_key.get(public_key_to_bytes(load_public(public)))
        online = node is not None and node.status == NodeStatus.ONLINE
        state = ConnectedSite(site.number, site.name, key, online, last_seen(node))
        before = found.get(site.number)
        if before is None or (state.last_seen or 0.0) >= (before.last_seen or 0.0):
            found[site.number] = state
    return [found[number] for number in sorted(found)]


def last_seen(node: NodeInfo | None) -> float | None:
    """When a node called last: at its last heartbeat, or when it disconnected."""
    if node is None or not node.last_activated_at:
        return None
    if node.status == NodeStatus.ONLINE:
        return node.online_until - HEARTBEAT_PATIENCE * node.heartbeat_interval
    return datetime.fromisoformat(node.last_deactivated_at or node.last_activated_at).timestamp()
