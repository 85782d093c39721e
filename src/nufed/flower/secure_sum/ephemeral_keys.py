"""Signatures by site keys; ephemeral key agreement and authenticated encryption."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from nufed.files import canonical
from nufed.flower.secure_sum.terms import SecureSumError, as_json

Sign: TypeAlias = Callable[[bytes], bytes]
Verify: TypeAlias = Callable[[int, bytes, bytes], bool]  # site, message, signature
NONCE_BYTES = 12
PUBLIC_BYTES = 32


@as_json
@dataclass(frozen=True)
class Advert:
    """A site's ephemeral public keys and the digest of its own mask's key, signed."""

    encryption: bytes
    masking: bytes
    commitment: bytes  # SHA-256 of the own mask's key
    signature: bytes

    @property
    def signed(self) -> list[str]:
        """What the signature covers, beside the terms and the site."""
        return [part.hex() for part in (self.encryption, self.masking, self.commitment)]


def new_private() -> bytes:
    """An ephemeral private key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(private: bytes) -> bytes:
    """Its public key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed_key(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """The key that both ends derive, for one purpose."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise SecureSumError("an ephemeral public key is invalid") from error
    return HKDF(hashes.SHA256(), 32, salt=None, info=purpose).derive(shared)


def encrypt(key: bytes, text: bytes, context: bytes) -> bytes:
    """Authenticated encryption, bound to its context."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, context)


def decrypt(key: bytes, sealed: bytes, context: bytes, sender: int) -> bytes:
    """The inverse of :func:`encrypt`; the sender is for the error message."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context)
    except (InvalidTag, ValueError) as error:
        raise SecureSumError(
            f"the encrypted share of site {sender} is damaged or from another attempt"
        ) from error


def pair_context(digest: bytes, purpose: str, first: int, second: int) -> bytes:
    """Binds a key or ciphertext to the terms, its purpose and an ordered pair of sites."""
    return canonical(digest.hex(), purpose, first, second)
