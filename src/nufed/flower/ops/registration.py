"""Edits the registry of sites: a running server applies each change within seconds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nufed.errors import InputError
from nufed.flower.app.signatures import fingerprint, read_public
from nufed.flower.app.site_registry import (
    SITES,
    RegisteredSite,
    SiteRegistry,
    read_sites,
    validated,
    write_sites,
)


def register_site(folder: Path, number: int, name: str, key: Path) -> str:
    """Register a site with its public key; returns the key's fingerprint."""
    public, registry = read_public(key), _read(folder)
    new = {"number": number, "name": name, "keys": [public]}
    _write(folder, [*registry.site, new], registry.revoked)
    return fingerprint(public)


def add_key(folder: Path, site: str, key: Path) -> str:
    """Add a site's new public key; its old one stays valid until :func:`revoke_old_key`."""
    public, registry = read_public(key), _read(folder)
    found = registry.named(site)
    if len(found.keys) > 1:
        raise InputError(
            f"site {found.number} ({found.name!r}) has two keys already: revoke the old one with "
            f"`nufed federate rotate {found.number} --finish`"
        )
    _replace(folder, registry, found, [*found.keys, public])
    return fingerprint(public)


def revoke_old_key(folder: Path, site: str) -> str:
    """Revoke a site's old key after its new one was added; returns the old one's fingerprint."""
    registry = _read(folder)
    found = registry.named(site)
    if len(found.keys) < 2:
        raise InputError(
            f"site {found.number} ({found.name!r}) has one key only: add the new one with `nufed "
            f"federate rotate {found.number} NEW.pub`"
        )
    old = fingerprint(found.keys[0])
    _replace(folder, registry, found, found.keys[1:], [old])
    return old


def revoke_site(folder: Path, site: str) -> RegisteredSite:
    """Remove a site and revoke its keys; its number may be registered again with another key."""
    registry = _read(folder)
    found = registry.named(site)
    keys = map(fingerprint, found.keys)
    rest = [each for each in registry.site if each != found]
    _write(folder, rest, [*registry.revoked, *keys])
    return found


def _replace(
    folder: Path,
    registry: SiteRegistry,
    site: RegisteredSite,
    keys: list[str],
    revoked: Iterable[str] = (),
) -> None:
    new = {**site.model_dump(), "keys": keys}
    sites = [new if each == site else each for each in registry.site]
    _write(folder, sites, [*registry.revoked, *revoked])


def _read(folder: Path) -> SiteRegistry:
    if not folder.is_dir():
        raise InputError(
            f"--keys {folder}: there is no such folder; make it with `nufed federate keys {folder}`"
        )
    path = folder / SITES
    return read_sites(path) if path.exists() else SiteRegistry()


def _write(folder: Path, sites: Iterable[object], revoked: list[str]) -> None:
    try:
        registry = validated({"site": list(sites), "revoked": revoked})
    except ValueError as error:
        raise InputError(f"{folder / SITES}: {error}") from None
    write_sites(folder / SITES, registry)
