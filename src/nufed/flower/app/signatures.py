"""Signatures with a site's key: ECDSA, bound to a purpose.

The key is the one that authenticates the site to Flower's SuperLink. What Flower signs with it is a
timestamp; what is signed here starts with :data:`PREFIX`, so neither can stand in for the other.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from nufed.errors import InputError
from nufed.lab.files import canonical

PREFIX = "nufed site signature"
HASH = ec.ECDSA(hashes.SHA384())


def sign(key: Path, purpose: str, content: bytes) -> bytes:
    """The signature of ``content`` for a purpose, with the private key in a file."""
    return private_key(key).sign(_statement(purpose, content), HASH)


def public_of(key: Path) -> str:
    """The public key of the private key in a file, as one line of OpenSSH's format."""
    return (
        private_key(key).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    )


def verify(public: str, purpose: str, content: bytes, signature: bytes) -> bool:
    """Whether the key with this public line signed ``content`` for this purpose."""
    try:
        load_public(public).verify(signature, _statement(purpose, content), HASH)
    except InvalidSignature:
        return False
    return True


def read_public(path: Path) -> str:
    """The public key in a file, as one line of OpenSSH's format without its comment."""
    try:
        return checked_public(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is not a public key of a site: give the FILE.pub that `nufed federate key "
            f"FILE` made ({error})"
        ) from None


def checked_public(text: str) -> str:
    """A public key's line without its comment; raises ValueError if it is not one."""
    line = " ".join(text.split()[:2])
    load_public(line)
    return line


def fingerprint(public: str) -> str:
    """The key's fingerprint, as ``ssh-keygen -lf FILE.pub`` prints it."""
    digest = hashlib.sha256(base64.b64decode(public.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def digest_of(records: Mapping[str, object]) -> bytes:
    """SHA-256 of a message's records: of every name, type and value, in a fixed order."""
    digest = hashlib.sha256()

    for key in sorted(records):
        record = records[key]
        if isinstance(record, ArrayRecord):
            digest.update(canonical(key, "arrays", len(record)))
            for name in sorted(record):
                array = record[name]
                about = (name, array.dtype, array.shape, array.stype, len(array.data))
                digest.update(canonical(*about))
                digest.update(array.data)
        elif isinstance(record, ConfigRecord | MetricRecord):
            digest.update(canonical(key, type(record).__name__, dict(record)))
        else:
            raise TypeError(f"a record of type {type(record).__name__} can't be signed")
    return digest.digest()


def _statement(purpose: str, content: bytes) -> bytes:
    return f"{PREFIX}\n{purpose}\n".encode() + content


def private_key(key: Path) -> ec.EllipticCurvePrivateKey:
    try:
        private = load_ssh_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(  # may be sent to the server: no path
            f"the site's private key can't be read ({type(error).__name__}): start the site with "
            "the one that `nufed federate key FILE` made"
        ) from None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise InputError("the site's key is no EC key: make one with `nufed federate key FILE`")
    return private


def load_public(public: str) -> ec.EllipticCurvePublicKey:
    """The public key in a line; raises ValueError if there is none."""
    try:
        key = load_ssh_public_key(public.encode())
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an EC key")
    return key
