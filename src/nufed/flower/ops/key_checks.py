"""Checks at start: private keys that others can read are refused, expiring certificates named."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from nufed.errors import InputError
from nufed.flower.ops.keys import CA, CA_KEY, CERTIFICATE, KEY
from nufed.flower.ops.link import Link

AHEAD = timedelta(days=30)
CONNECT_TIMEOUT = 10  # seconds


def check_private(path: Path) -> None:
    """Refuse a private key that other users of this machine may read or write."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise InputError(
            f"the private key {path} is accessible to other users (mode {mode:04o}): run chmod 600 "
            f"{path}, and make a new key if others may have read it"
        )


def check_server_keys(folder: Path) -> None:
    """The same for every private key in the server's folder."""
    for name in (KEY, CA_KEY):  # the CA's key should be elsewhere
        if (folder / name).exists():
            check_private(folder / name)


def server_expiry(folder: Path) -> list[str]:
    """Warnings about certificates in the server's folder that expire within 30 days."""
    files = {str(folder / name): (folder / name).read_bytes() for name in (CERTIFICATE, CA)}
    return list(_warnings(files))


def link_expiry(link: Link) -> list[str]:
    """The same for a server's certificate as it presents it, and the CA that authenticates it.

    If it can't be reached, connecting says so later.
    """
    if link.ca is None:
        return []
    files = {str(link.ca): link.ca.read_bytes()}
    host, _, port = link.address.rpartition(":")
    with suppress(OSError, ValueError):
        address = (host.strip("[]"), int(port))
        text = ssl.get_server_certificate(address, ca_certs=str(link.ca), timeout=CONNECT_TIMEOUT)
        files[f"the certificate of {link.address}"] = text.encode()
    return list(_warnings(files))


def _warnings(certificates: dict[str, bytes]) -> Iterator[str]:
    for name, content in certificates.items():
        try:
            end = x509.load_pem_x509_certificate(content).not_valid_after_utc
        except ValueError as error:
            raise InputError(f"{name} is not a usable certificate: {error}") from error
        left = end - datetime.now(UTC)
        if left < AHEAD:
            yield (
                f"warning: {name} {_when(left, end)}: make new ones with `nufed federate keys "
                "FOLDER --host HOST` and give the new ca.crt to every site"
            )


def _when(left: timedelta, end: datetime) -> str:
    if left < timedelta(0):
        return f"expired on {end:%Y-%m-%d}"
    return f"expires on {end:%Y-%m-%d}, in {left.days} days"
