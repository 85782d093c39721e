"""The status of a federation's run, from the file that its server writes, as text; and which of the
registered sites of a server are connected, with or without a run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nufed.errors import InputError
from nufed.flower.app.registry import SITES, SiteRegistry, read_sites
from nufed.flower.app.signatures import load_public
from nufed.flower.internals import Node, public_key_to_bytes
from nufed.flower.ops.keys import CA
from nufed.flower.ops.link import control_of, link_to
from nufed.lab.runs.federation_records import STATUS, SiteStatus, StatusRecord


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
    with control_of(link_to(server, keys / CA, insecure=False)) as control:
        return sites_of_nodes(registry, control.nodes())


def sites_of_nodes(registry: SiteRegistry, nodes: Iterable[Node]) -> list[ConnectedSite]:
    """The state of every registered site, by number."""
    sites: dict[int, ConnectedSite] = {}
    by_key = {node.public_key: node for node in nodes}
    for key, public, site in registry.entries():
        node = by_key.get(public_key_to_bytes(load_public(public)))
        online, last_seen = (node.online, node.last_seen) if node else (False, None)
        state = ConnectedSite(site.number, site.name, key, online, last_seen)
        before = sites.get(site.number)
        if before is None or (state.last_seen or 0.0) >= (before.last_seen or 0.0):
            sites[site.number] = state
    return [sites[number] for number in sorted(sites)]


STALE = 60.0  # seconds after which a server that writes every few seconds is taken to be gone
ENDS = ("finished", "failed")
HEADINGS = ("number", "name", "connected", "last seen", "left out", "last left out")
SERVER_HEADINGS = ("number", "name", "connected", "last seen", "key")


def newest_run(folder: Path = Path("runs")) -> Path:
    """The run directory whose status was written last."""
    files = sorted(folder.glob(f"*/{STATUS}"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise InputError(
            f"no run of a federation has started in {folder.absolute()}: give the run directory, "
            "on the server's machine, or --keys FOLDER to see the sites of a server without a run"
        )
    return files[-1].parent


def is_gone(status: StatusRecord, now: float | None = None) -> bool:
    """Whether the server stopped without an end: it was killed, or its machine is down."""
    return (
        status.state not in ENDS and (time.time() if now is None else now) - status.updated > STALE
    )


def has_ended(status: StatusRecord) -> bool:
    """Whether it finished, failed, or its server is gone."""
    return status.state in ENDS or is_gone(status)


def summary(status: StatusRecord) -> list[str]:
    """The state of a run in a few lines."""
    state: str = status.state
    if is_gone(status):
        state = f"stopped without an end (was {state}), resume it with --resume"
    parts = [f"{status.name}: {state}", f"round {status.round} of {status.rounds}"]
    if status.seconds_left is not None and not is_gone(status):
        parts.append(f"about {duration(status.seconds_left)} left")
    if status.last_seconds is not None:
        parts.append(f"the last round took {duration(status.last_seconds)}")
    lines = [f"{', '.join(parts)}; updated {ago(status.updated)}"]
    if has_ended(status):
        lines.append("this run is over; its sites are shown as they were at its end")
    elif status.state == "waiting for sites":
        lines.append("no round has started: the run waits for its sites")
    connected = sum(site.connected for site in status.sites)
    left_out = ", ".join(f"{number} {kind}" for kind, number in status.left_out.items())
    lines.append(
        f"{connected} of {len(status.sites)} sites connected; {megabytes(status.bytes_down)} sent, "
        f"{megabytes(status.bytes_up)} received; left out: {left_out or 'none'}"
    )
    if status.epsilon:
        spent = {key: "∞" if e is None else f"{e:.4g}" for key, e in status.epsilon.items()}
        lines.append(
            f"epsilon spent: {spent['released']} of the released model, {spent['server']} against "
            "the server"
        )
    return lines + ([f"failed: {status.failure}"] if status.failure else [])


def site_row(site: SiteStatus) -> list[str]:
    """A row under :data:`HEADINGS`."""
    last = site.last_left_out
    connected = "yes" if site.connected else "no"
    if site.excluded:
        connected += f", excluded: {site.excluded}"
    elif site.connected and not site.joined:
        connected += ", has not answered yet"
    return [
        str(site.number),
        site.name,
        connected,
        seen(site.last_seen),
        str(site.left_out),
        "–" if last is None else f"round {last.round}: {last.reason}",
    ]


def connected_row(site: ConnectedSite) -> list[str]:
    """A row under :data:`SERVER_HEADINGS`."""
    yes = "yes" if site.connected else "no"
    return [str(site.number), site.name, yes, seen(site.last_seen), site.key]


def seen(moment: float | None) -> str:
    return "never" if moment is None else ago(moment)


def ago(moment: float) -> str:
    return f"{duration(max(0.0, time.time() - moment))} ago"


def duration(seconds: float) -> str:
    """Seconds as text.

    >>> duration(3.2), duration(200), duration(7300)
    ('3 s', '3 min 20 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
