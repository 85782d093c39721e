"""The site's half of a secure sum: five functions, each called once per attempt, in order.

First the keys that they use: signatures by site keys, ephemeral key agreement, and authenticated
encryption.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from nufed.flower.internals import create_shares
from nufed.flower.secure_sum.terms import SecureSumError, SumTerms, as_json
from nufed.flower.secure_sum.words import KEY_BYTES, Words, add, mask, subtract
from nufed.lab.files import canonical

Sign: TypeAlias = Callable[[bytes], bytes]
Verify: TypeAlias = Callable[[int, bytes, bytes], bool]  # site, message, signature
NONCE_BYTES = 12


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
        """What the signature covers in addition to the terms and the site."""
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


SHARE, ENCRYPTION, MASKING = "share", "encryption", "masking"


@as_json
@dataclass(frozen=True)
class Secrets:
    """A site's secrets of one attempt; ``phase`` is the number of phases it has completed."""

    terms: SumTerms
    site: int
    phase: int
    encryption: bytes  # private keys
    masking: bytes
    own: bytes  # key of its own mask
    adverts: Mapping[int, Advert] = field(default_factory=dict)
    shares: Mapping[int, tuple[bytes, bytes]] = field(default_factory=dict)  # own mask, masking key
    survivors: tuple[int, ...] = ()

    def expect(self, phase: int) -> None:
        """Refuse a phase out of order or a second time: its randomness is never reused."""
        if self.phase != phase:
            raise SecureSumError(
                f"phase {phase + 1} of this attempt was requested after phase {self.phase}: start "
                "a new attempt"
            )


@as_json
@dataclass(frozen=True)
class Unmasking:
    """A site's shares of others' secrets: of own masks, and of masking keys; of no site both."""

    own: Mapping[int, bytes]
    masking: Mapping[int, bytes]


def advertise(terms: SumTerms, site: int, sign: Sign) -> tuple[Secrets, Advert]:
    """Phase 1: fresh keys, signed by the site's key."""
    if site not in terms.sites:
        raise SecureSumError(f"site {site} is not in the cohort of this sum")
    mask_key = secrets.token_bytes(KEY_BYTES)
    made = Secrets(terms, site, 1, new_private(), new_private(), mask_key)
    advert = _unsigned(made)
    return made, replace(advert, signature=sign(signed_message(terms, site, advert)))


def signed_message(terms: SumTerms, site: int, advert: Advert) -> bytes:
    """What a site signs."""
    return canonical("keys", terms.digest.hex(), site, advert.signed)


def _unsigned(held: Secrets) -> Advert:
    commitment = hashlib.sha256(held.own).digest()
    return Advert(public_of(held.encryption), public_of(held.masking), commitment, b"")


def share(
    held: Secrets, adverts: Mapping[int, Advert], verify: Verify
) -> tuple[Secrets, dict[int, bytes]]:
    """Phase 2: shares of both secrets, encrypted for every other site."""
    held.expect(1)
    terms = held.terms
    terms.check_enough(len(adverts), "sent their keys")
    for site, advert in adverts.items():
        known = site in terms.sites
        if not known or not verify(site, signed_message(terms, site, advert), advert.signature):
            raise SecureSumError(f"the keys of site {site} are not signed by its registered key")
    mine = adverts.get(held.site)
    if mine is None or mine.signed != _unsigned(held).signed:
        raise SecureSumError("the server sent other keys of this site than its own")
    sites = sorted(adverts)
    of_own, of_masking = (
        dict(zip(sites, create_shares(secret, terms.threshold, len(sites)), strict=True))
        for secret in (held.own, held.masking)
    )
    sealed = {
        site: encrypt(
            _pair_key(held, advert.encryption, site),
            len(of_own[site]).to_bytes(2, "little") + of_own[site] + of_masking[site],
            pair_context(terms.digest, SHARE, held.site, site),
        )
        for site, advert in adverts.items()
        if site != held.site
    }
    kept = {held.site: (of_own[held.site], of_masking[held.site])}
    return replace(held, phase=2, adverts=dict(adverts), shares=kept), sealed


def masked(held: Secrets, sealed: Mapping[int, bytes], words: Words) -> tuple[Secrets, Words]:
    """Phase 3: the words plus the own mask, plus or minus one mask per site that sent shares."""
    held.expect(2)
    terms = held.terms
    if held.site in sealed or not sealed.keys() <= held.adverts.keys():
        raise SecureSumError("the server sent shares of sites without keys")
    terms.check_enough(len(sealed) + 1, "sent their shares")
    shares = dict(held.shares)
    for site, text in sealed.items():
        key = _pair_key(held, held.adverts[site].encryption, site)
        plain = decrypt(key, text, pair_context(terms.digest, SHARE, site, held.site), site)
        end = 2 + int.from_bytes(plain[:2], "little")
        shares[site] = plain[2:end], plain[end:]
    total = add(words, mask(held.own, words.shape))
    for site in sealed:
        pair = pairwise_mask(
            terms, held.site, held.masking, site, held.adverts[site].masking, words
        )
        total = add(total, pair) if held.site < site else subtract(total, pair)
    return replace(held, phase=3, shares=shares), total


def pairwise_mask(
    terms: SumTerms, site: int, private: bytes, other: int, public: bytes, like: Words
) -> Words:
    """The mask that two sites share; the lower number adds it, the higher one subtracts it."""
    pair = sorted((site, other))
    key = agreed_key(private, public, pair_context(terms.digest, MASKING, pair[0], pair[1]))
    return mask(key, like.shape)


def confirm(held: Secrets, survivors: frozenset[int], sign: Sign) -> tuple[Secrets, bytes]:
    """Phase 4: a signature of the one set of survivors that this site will help to unmask."""
    held.expect(3)
    if held.site not in survivors or not survivors <= held.shares.keys():
        raise SecureSumError("the server named sites of the sum that sent no shares")
    held.terms.check_enough(len(survivors), "sent their update")
    confirmed = replace(held, phase=4, survivors=tuple(sorted(survivors)))
    return confirmed, sign(confirmed_message(confirmed))


def confirmed_message(held: Secrets) -> bytes:
    """What sites sign before they release shares: the survivors, and the keys of all sites.

    Keys are fresh in every attempt, so a signature counts only among sites that were sent the same
    keys, and a site has one signature for these.
    """
    adverts = canonical([[site, held.adverts[site].signed] for site in sorted(held.adverts)])
    keys = hashlib.sha256(adverts).hexdigest()
    return canonical("survivors", held.terms.digest.hex(), keys, held.survivors)


def unmask(
    held: Secrets, confirmations: Mapping[int, bytes], verify: Verify
) -> tuple[Secrets, Unmasking]:
    """Phase 5: shares of the own masks of survivors, and of the masking keys of the others.

    Only once enough sites confirmed the same survivors: else a server that names different ones to
    different sites could collect what unmasks a single update.
    """
    held.expect(4)
    message = confirmed_message(held)
    valid = [
        site
        for site, signature in confirmations.items()
        if site in held.survivors and verify(site, message, signature)
    ]
    held.terms.check_enough(len(valid), "confirmed the same sum")
    released = Unmasking(
        {site: shares[0] for site, shares in held.shares.items() if site in held.survivors},
        {site: shares[1] for site, shares in held.shares.items() if site not in held.survivors},
    )
    return replace(held, phase=5, shares={}, own=b"", masking=b"", encryption=b""), released


def _pair_key(held: Secrets, public: bytes, site: int) -> bytes:
    pair = sorted((held.site, site))
    context = pair_context(held.terms.digest, ENCRYPTION, pair[0], pair[1])
    return agreed_key(held.encryption, public, context)
