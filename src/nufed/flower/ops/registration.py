"""Edits the registry of sites: a running server applies each change within seconds.

Every change is also written to the audit log beside it. :class:`Admission` keeps the keys that a
SuperLink admits equal to those of the registry.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nufed.errors import InputError, RunError
from nufed.flower.app.registry import (
    NODES,
    SITES,
    RegisteredSite,
    SiteRegistry,
    read_sites,
    validated,
    write_sites,
)
from nufed.flower.app.signatures import fingerprint, load_public, read_public
from nufed.flower.ops.link import Link, control_of
from nufed.lab.files import write_durably
from nufed.lab.runs.audit_log import AUDIT, AuditLog


class Admission:
    """The keys registered at a SuperLink, by their fingerprints.

    Args:
        link: the SuperLink.
        home: the folder that its server app reads; which key has which node id is written there.
        file: the registry of sites; a server may start without one.
        say: called with a line for every change.
    """

    def __init__(self, link: Link, home: Path, file: Path, say: Callable[[str], None]) -> None:
        self._link, self._home, self._file, self._say = link, home, file, say
        self._nodes: dict[str, str] = {}  # fingerprint -> Flower's node id
        self._applied = SiteRegistry()
        self._complaint = ""

    def apply(self) -> None:
        """Register new keys and unregister removed ones, if the registry has changed."""
        registry = read_sites(self._file) if self._file.exists() else SiteRegistry()
        if registry != self._applied:
            self._apply(registry)
            self._applied = registry

    def keep_applied(self) -> None:
        """Apply the registry while the server runs; a failure is logged once and retried."""
        try:
            self.apply()
            self._complaint = ""
        except (InputError, RunError) as error:
            if str(error) != self._complaint:
                self._say(f"the registry of sites is not applied: {error}")
            self._complaint = str(error)

    def _apply(self, registry: SiteRegistry) -> None:
        wanted = {key: (public, site) for key, public, site in registry.entries()}
        with control_of(self._link) as control:
            for key in self._nodes.keys() - wanted.keys():
                control.unregister(self._nodes[key])
                del self._nodes[key]
                self._say(f"unregistered the key {key}")
            for key, (public, site) in wanted.items():
                if key not in self._nodes:
                    self._nodes[key] = control.register(load_public(public))
                    self._say(f"registered {site.label(key)}")
        nodes = {node: key for key, node in self._nodes.items()}
        write_durably(self._home / NODES, json.dumps(nodes, indent=1).encode())


def register_site(folder: Path, number: int, name: str, key: Path) -> str:
    """Register a site with its public key; returns the key's fingerprint."""
    public = read_public(key)
    with _registry_of(folder) as old:
        site = {"number": number, "name": name, "keys": [public]}
        new = _changed(folder, [*old.site, site], old.revoked)
        _write(folder, new, "registered", new.site[-1], [public])
    return fingerprint(public)


def add_key(folder: Path, site: str, key: Path) -> str:
    """Add a site's new public key; its old one stays valid until :func:`revoke_old_key`."""
    public = read_public(key)
    with _registry_of(folder) as old:
        member = old.named(site)
        if len(member.keys) > 1:
            raise InputError(
                f"site {member.number} ({member.name!r}) has two keys already: revoke the old one "
                f"with `nufed federate rotate {member.number} --finish`"
            )
        sites = _replaced(old, member, [*member.keys, public])
        _write(folder, _changed(folder, sites, old.revoked), "added key", member, [public])
    return fingerprint(public)


def revoke_old_key(folder: Path, site: str) -> str:
    """Revoke a site's old key after its new one was added; returns the old one's fingerprint."""
    with _registry_of(folder) as old:
        member = old.named(site)
        if len(member.keys) < 2:
            raise InputError(
                f"site {member.number} ({member.name!r}) has one key only: add the new one with "
                f"`nufed federate rotate {member.number} NEW.pub`"
            )
        key = fingerprint(member.keys[0])
        sites = _replaced(old, member, member.keys[1:])
        new = _changed(folder, sites, [*old.revoked, key])
        _write(folder, new, "revoked key", member, member.keys[:1])
    return key


def revoke_site(folder: Path, site: str) -> RegisteredSite:
    """Remove a site and revoke its keys; its number may be registered again with another key."""
    with _registry_of(folder) as old:
        member = old.named(site)
        rest = [each for each in old.site if each != member]
        new = _changed(folder, rest, [*old.revoked, *map(fingerprint, member.keys)])
        _write(folder, new, "revoked site", member, member.keys)
    return member


@contextmanager
def _registry_of(folder: Path) -> Iterator[SiteRegistry]:
    """The registry in a folder, which nobody else edits meanwhile."""
    if not folder.is_dir():
        raise InputError(
            f"--keys {folder}: there is no such folder; make it with `nufed federate keys {folder}`"
        )
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / SITES
        yield read_sites(path) if path.exists() else SiteRegistry()
    finally:
        os.close(lock)


def _replaced(registry: SiteRegistry, site: RegisteredSite, keys: list[str]) -> list[object]:
    """The sites, with other keys of one."""
    new = {**site.model_dump(), "keys": keys}
    return [new if each == site else each for each in registry.site]


def _changed(folder: Path, sites: Sequence[object], revoked: Sequence[str]) -> SiteRegistry:
    try:
        return validated({"site": list(sites), "revoked": list(revoked)})
    except ValueError as error:
        raise InputError(f"{folder / SITES}: {error}") from None


def _write(
    folder: Path, registry: SiteRegistry, event: str, site: RegisteredSite, keys: Sequence[str]
) -> None:
    about = {"site": site.number, "name": site.name, "keys": [fingerprint(key) for key in keys]}
    AuditLog(folder / AUDIT).write(event, **about)
    write_sites(folder / SITES, registry)
