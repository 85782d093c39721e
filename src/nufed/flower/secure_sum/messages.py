"""The payloads of secure aggregation: validated JSON, and masked updates as bytes.

What server and sites send to each other beside terms, adverts and shares that are returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType
from pydantic import TypeAdapter, ValidationError

from nufed.errors import shown
from nufed.flower.app.payload import ARRAYS, STORED_AS, PayloadError, get_record, npy_header
from nufed.flower.secure_sum.masking import Advert
from nufed.flower.secure_sum.terms import PROTOCOL, as_json
from nufed.flower.secure_sum.words import Words


@dataclass(frozen=True)
class OfAttempt:
    """A message of an attempt at a sum."""

    run: str
    attempt: str


@as_json
@dataclass(frozen=True)
class Adverts(OfAttempt):
    """The keys of all sites, to each of them."""

    adverts: Mapping[int, Advert]


@as_json
@dataclass(frozen=True)
class SealedShares(OfAttempt):
    """Encrypted shares: from a site by receiver, or to a site by sender."""

    sealed: Mapping[int, bytes]


@as_json
@dataclass(frozen=True)
class Survivors(OfAttempt):
    """The sites whose masked updates arrived."""

    sites: tuple[int, ...]


@as_json
@dataclass(frozen=True)
class Confirmation:
    """A site's signature of the survivors."""

    signature: bytes


@as_json
@dataclass(frozen=True)
class Confirmations(OfAttempt):
    """The signatures of all sites that confirmed the survivors."""

    signatures: Mapping[int, bytes]


SECURE, JSON, PROTOCOL_KEY, WORDS = "secure", "json", "protocol", "words"
# the actions of messages
ADVERTISE, SHARE, MASKED, CONFIRM, UNMASK = "advertise", "share", "masked", "confirm", "unmask"
# kinds of messages that are answered with an update
TRAINS = (MessageType.TRAIN, f"{MessageType.TRAIN}.{MASKED}")
LITTLE_ENDIAN = np.dtype("<u8")
Found = TypeVar("Found")


def adapter(kind: type[Found]) -> TypeAdapter[Found]:
    """Reads and writes a class as JSON; made once, which takes milliseconds."""
    return _adapters(cast(Any, kind))


@cache
def _adapters(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def secure_record(value: object) -> ConfigRecord:
    """A message of the protocol."""
    return ConfigRecord({JSON: adapter(type(value)).dump_json(value), PROTOCOL_KEY: PROTOCOL})


def read_secure(records: Mapping[str, object], kind: type[Found]) -> Found:
    """A message of the protocol, of the given class."""
    record = get_record(records, SECURE, ConfigRecord)
    text, protocol = record.get(JSON), record.get(PROTOCOL_KEY, 1)  # 1 was not sent
    if protocol != PROTOCOL:
        raise PayloadError(
            f"its nufed has version {shown(protocol)} of secure aggregation, not {PROTOCOL}: "
            "install the same nufed at the server and at all sites, and have every site approve "
            "the app again"
        )
    try:
        if not isinstance(text, bytes):
            raise ValueError("no JSON")
        return adapter(kind).validate_json(text)
    except (ValidationError, ValueError):
        raise PayloadError(f"it sent no valid {kind.__name__} for secure aggregation") from None


def words_record(words: Words) -> ArrayRecord:
    """A masked update."""
    return ArrayRecord({WORDS: Array(words.astype(LITTLE_ENDIAN))})


def read_words(records: Mapping[str, object], shape: tuple[int, int]) -> Words:
    """A masked update of the given shape."""
    arrays = get_record(records, ARRAYS, ArrayRecord)
    array = arrays.get(WORDS)
    header = npy_header(LITTLE_ENDIAN, shape)
    if (
        arrays.keys() != {WORDS}
        or (array.stype, array.dtype, array.shape) != (STORED_AS, LITTLE_ENDIAN.name, shape)
        or len(array.data) != len(header) + LITTLE_ENDIAN.itemsize * shape[0] * shape[1]
        or not array.data.startswith(header)
    ):
        raise PayloadError("its masked update does not have the size and type of the model's")
    numbers = np.frombuffer(array.data, LITTLE_ENDIAN, offset=len(header))
    return numbers.reshape(shape).astype(np.uint64)
