"""Every reply of a registered site is signed with its key; the server verifies it.

A site signs the id of the message that it replies to and the digest of its reply. That id is the
digest of the server's message with its run, its receiver and its time: a signature is valid for one
reply to one request. So nobody else's reply is taken for a site's: not that of another registered
site, nor that of another user of the site's machine, who could reach a SuperNode.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict

from nufed.errors import InputError, shown
from nufed.flower.app.payload import PayloadError
from nufed.flower.app.signatures import digest_of, fingerprint, public_of, sign, verify
from nufed.flower.app.site_registry import NODES, SITES_VARIABLE, RegisteredSite, read_sites

LOG = logging.getLogger("nufed")
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
        found = self.registry.find(key)
        if found is None:
            how = "revoked" if key in self.registry.revoked else "not registered"
            raise PayloadError(f"its key {shown(key)[1:-1]} is {how}")
        if not verify(found[0], REPLY, _statement(message_id, records), signature):
            raise PayloadError(f"its signature is not one of the key {key} for this reply")
        return key

    def site_of(self, node: int) -> RegisteredSite | None:
        """The site whose registered key signs for this node."""
        found = self.registry.find(self._keys.get(node, "")) if self.registry else None
        return found[1] if found else None

    def number_of(self, node: int, agents: int) -> int | None:
        """The number of the site with this node's key, signed or admitted, if it is below."""
        found = self.registry.find(self.key_of(node)) if self.registry else None
        return found[1].number if found and found[1].number < agents else None

    def names(self, agents: int) -> dict[int, str]:
        """The names of the sites registered with numbers below."""
        sites = self.registry.site if self.registry else ()
        return {site.number: site.name for site in sites if site.number < agents}

    def rank(self, node: int) -> int:
        """The position of the node's key among its site's: the newest is the largest."""
        site = self.site_of(node)
        return [fingerprint(key) for key in site.keys].index(self._keys[node]) if site else -1

    def label(self, node: int) -> str:
        """How logs name a node: by its site, its key, or only Flower's id if none is known."""
        key = self.key_of(node)
        found = self.registry.find(key) if self.registry and key else None
        if found:
            return found[1].label(key)
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
