"""What server and sites send to each other beside terms, adverts and shares that are returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nufed.flower.app.secure_sum.ephemeral_keys import Advert
from nufed.flower.app.secure_sum.sum_terms import as_json


@as_json
@dataclass(frozen=True)
class Adverts:
    """The keys of all sites, to each of them."""

    run: str
    attempt: str
    adverts: Mapping[int, Advert]


@as_json
@dataclass(frozen=True)
class SealedShares:
    """Encrypted shares: from a site by receiver, or to a site by sender."""

    run: str
    attempt: str
    sealed: Mapping[int, bytes]


@as_json
@dataclass(frozen=True)
class Survivors:
    """The sites whose masked updates arrived."""

    run: str
    attempt: str
    sites: tuple[int, ...]


@as_json
@dataclass(frozen=True)
class Confirmation:
    """A site's signature of the survivors."""

    signature: bytes


@as_json
@dataclass(frozen=True)
class Confirmations:
    """The signatures of all sites that confirmed the survivors."""

    run: str
    attempt: str
    signatures: Mapping[int, bytes]
