"""The registered sites of a federation and their keys, with which they sign every reply.

A site signs the id of the message that it replies to and the digest of its reply. That id is the
digest of the server's message with its run, its receiver and its time: a signature is valid for one
reply to one request. So nobody else's reply is taken for a site's: not that of another registered
site, nor that of another user of the site's machine, who could reach a SuperNode.

The server's registry has number, name and public keys of each site, in one TOML file::

    revoked = ["SHA256:..."]        # fingerprints of keys that are never admitted again

    [[site]]
    number = 0
    name = "Ward 3"
    keys = ["ecdsa-sha2-nistp384 AAAA..."]      # while a key is rotated two, the newest last

``nufed federate register``, ``rotate`` and ``revoke`` write it. A running server applies changes.
Sites know each other's public keys (:class:`SiteKeys`) from the configuration, not from the server.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import tomli_w
from flwr.app import ConfigRecord, RecordDict
from pydantic import AfterValidator, Field, ValidationError, model_validator

from nufed.errors import InputError, shown
from nufed.flower.app.payload import MAX_NAME_LENGTH, PayloadError
from nufed.flower.app.signatures import (
    checked_public,
    digest_of,
    fingerprint,
    public_of,
    sign,
    verify,
)
from nufed.flower.logs import LOG
from nufed.lab.files import write_durably
from nufed.lab.runs.json_files import Record

SITES = "sites.toml"
NODES = "nodes.json"  # in the server's FLWR_HOME: Flower's node ids -> keys' fingerprints
SITES_VARIABLE = "NUFED_SITES"  # the registry's path, in the environment of the ServerApp


def _checked_name(name: str) -> str:
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable() or name.isdecimal():
        raise ValueError(
            f"a name is one line of 1 to {MAX_NAME_LENGTH} characters, and not a number"
        )
    return name


class RegisteredSite(Record):
    """A site: its number from 0, its name, and its public keys, the newest last."""

    number: Annotated[int, Field(ge=0)]
    name: Annotated[str, AfterValidator(_checked_name)]
    keys: Annotated[
        list[Annotated[str, AfterValidator(checked_public)]], Field(min_length=1, max_length=2)
    ]

    def label(self, key: str) -> str:
        """Its name in logs, with the fingerprint of the key that it uses."""
        return f"site {self.number} ({self.name!r}, key {key})"


class SiteRegistry(Record):
    """All registered sites, and the fingerprints of revoked keys."""

    revoked: list[str] = Field(default_factory=list)
    site: list[RegisteredSite] = Field(default_factory=list)

    @model_validator(mode="after")
    def _unique(self) -> Self:
        keys = [key for key, _, _ in self.entries()]
        for what, values in (
            ("number", [site.number for site in self.site]),
            ("name", [site.name for site in self.site]),
            ("key", [*keys, *dict.fromkeys(self.revoked)]),
        ):
            twice = [value for value, times in Counter(values).items() if times > 1]
            if twice:
                also = " or revoked" if what == "key" else ""
                raise ValueError(f"the {what} {twice[0]} is registered twice{also}")
        return self

    def entries(self) -> Iterator[tuple[str, str, RegisteredSite]]:
        """Every admitted key: its fingerprint, the public key, and its site."""
        for site in self.site:
            for public in site.keys:
                yield fingerprint(public), public, site

    def find(self, key: str) -> tuple[str, RegisteredSite] | None:
        """The public key with this fingerprint and its site; None if it is not admitted."""
        return next(((public, site) for each, public, site in self.entries() if each == key), None)

    def named(self, number_or_name: str) -> RegisteredSite:
        """The site with this number or name."""
        for site in self.site:
            if number_or_name in (str(site.number), site.name):
                return site
        raise InputError(
            f"no site {number_or_name!r} is registered; registered are "
            + (", ".join(f"{site.number} ({site.name!r})" for site in self.site) or "none")
        )


def read_sites(path: Path) -> SiteRegistry:
    """The registry in a file, validated."""
    try:
        if path.stat().st_mode & 0o022:
            raise InputError(f"{path} is writable by other users: run chmod 644 {path}")
        return validated(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise InputError(
            f"the registry {path} can't be read ({error.strerror}): register sites with `nufed "
            "federate register`"
        ) from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the registry {path} is invalid: {error}") from None


def validated(content: dict[str, Any]) -> SiteRegistry:
    """The registry with this content; raises ValueError with one sentence."""
    try:
        return SiteRegistry.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{shown(where)[1:-1]}: {what}" if where else what) from None


def write_sites(path: Path, registry: SiteRegistry) -> None:
    """Replace the file atomically."""
    write_durably(path, tomli_w.dumps(registry.model_dump(), multiline_strings=False).encode())
    path.chmod(0o644)  # public keys; the server's user must be able to read it


SECURE_SUM = "secure sum"  # the purpose of signatures under secure aggregation


@dataclass(frozen=True)
class SiteKeys:
    """The public keys of all sites, by number, as lines of their ``.pub`` files."""

    lines: tuple[str, ...]

    def __post_init__(self) -> None:
        for number, line in enumerate(self.lines):
            try:
                checked_public(line)
            except ValueError:
                raise InputError(
                    f"federation.site_keys[{number}] = {shown(line)}: must be the line of a .pub "
                    "file that `nufed federate key` made"
                ) from None
        if len({checked_public(line) for line in self.lines}) != len(self.lines):
            raise InputError("federation.site_keys has a key twice: every site has its own")

    def verify(self, site: int, message: bytes, signature: bytes) -> bool:
        """Whether a site's key signed a message for a secure sum."""
        if not 0 <= site < len(self.lines):
            return False
        return verify(self.lines[site], SECURE_SUM, message, signature)


SIGNATURE = "signature"
REPLY = "reply"  # the purpose of these signatures


def signed(reply: RecordDict, message_id: str, key: Path) -> RecordDict:
    """The reply to a message with the site's signature."""
    signature = sign(key, REPLY, _statement(message_id, reply))
    record = ConfigRecord({"key": fingerprint(public_of(key)), "signature": signature})
    return RecordDict({**reply, SIGNATURE: record})


def registry_file() -> Path | None:
    """The registry that this server applies; None: site numbers are not bound to keys."""
    path = os.environ.get(SITES_VARIABLE)
    return Path(path) if path else None


class Authentication:
    """Verifies the signatures of replies, and names the sites behind Flower's node ids.

    Args:
        file: the registry; None: there is no ``registry``, and signatures are not required.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.registry = None if file is None else read_sites(file)
        self._complaint = ""
        self._keys: dict[int, str] = {}  # node -> fingerprint of the key that signs for it

    def reload(self) -> None:
        """Read the registry; while it is invalid the last valid one stays in use."""
        if self._file is None:
            return
        try:
            self.registry, self._complaint = read_sites(self._file), ""
        except InputError as error:
            if str(error) != self._complaint:
                LOG.error("%s; the last valid one stays in use", error)
            self._complaint = str(error)

    def accept(self, node: int, message_id: str, reply: RecordDict) -> RecordDict:
        """A reply without its signature, which must be valid if there is a registry."""
        records = RecordDict({key: reply[key] for key in reply if key != SIGNATURE})
        if self.registry is None:
            return records
        self.reload()
        key = self._signer(reply.get(SIGNATURE), message_id, records)
        if self._keys.setdefault(node, key) != key:
            raise PayloadError(f"its reply is signed with another site's key {key}")
        return records

    def _signer(self, record: object, message_id: str, records: RecordDict) -> str:
        """The fingerprint of the registered key that signed a reply."""
        if not isinstance(record, ConfigRecord) or record.keys() != {"key", "signature"}:
            raise PayloadError("its reply is not signed with a registered key")
        key, signature = record["key"], record["signature"]
        if not isinstance(key, str) or not isinstance(signature, bytes):
            raise PayloadError("its signature is not a key's fingerprint and bytes")
        assert self.registry is not None
        admitted = self.registry.find(key)
        if admitted is None:
            how = "revoked" if key in self.registry.revoked else "not registered"
            raise PayloadError(f"its key {shown(key)[1:-1]} is {how}")
        if not verify(admitted[0], REPLY, _statement(message_id, records), signature):
            raise PayloadError(f"its signature is not one of the key {key} for this reply")
        return key

    def site_of(self, node: int) -> RegisteredSite | None:
        """The site whose registered key signs for this node."""
        admitted = self.registry.find(self._keys.get(node, "")) if self.registry else None
        return admitted[1] if admitted else None

    def number_of(self, node: int, agents: int) -> int | None:
        """The number of the site with this node's key, signed or admitted, if it is below."""
        admitted = self.registry.find(self.key_of(node)) if self.registry else None
        return admitted[1].number if admitted and admitted[1].number < agents else None

    def names(self, agents: int) -> dict[int, str]:
        """The names of the sites registered with numbers below."""
        sites = self.registry.site if self.registry else ()
        return {site.number: site.name for site in sites if site.number < agents}

    def rank(self, node: int) -> int:
        """The position of the node's key among its site's: the newest is the largest."""
        site = self.site_of(node)
        return [fingerprint(key) for key in site.keys].index(self._keys[node]) if site else -1

    def label(self, node: int) -> str:
        """A node's name in logs: its site, its key, or only Flower's id if neither is known."""
        key = self.key_of(node)
        admitted = self.registry.find(key) if self.registry and key else None
        if admitted:
            return admitted[1].label(key)
        return f"the site with key {key}" if key else f"node {node}"

    def key_of(self, node: int) -> str:
        """The fingerprint of a node's key: of that which signs, or which the SuperLink admitted.

        Empty if it is not known, as without keys.
        """
        if node in self._keys or self.registry is None:
            return self._keys.get(node, "")
        try:  # written by the server
            text = (Path(os.environ["FLWR_HOME"]) / NODES).read_text()
            return str(json.loads(text)[str(node)])
        except (OSError, ValueError, KeyError, TypeError):
            return ""


def _statement(message_id: str, records: RecordDict) -> bytes:
    return f"{message_id}\n".encode() + digest_of(records)
