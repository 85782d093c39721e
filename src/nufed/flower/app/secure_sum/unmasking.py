"""The server's half of a secure sum: relays keys and shares, adds what arrives, removes masks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from flwr.common.secure_aggregation.crypto.shamir import combine_shares

from nufed.flower.app.secure_sum.ephemeral_keys import Advert, public_of
from nufed.flower.app.secure_sum.masking import Unmasking, pairwise_mask
from nufed.flower.app.secure_sum.sum_terms import SecureSumError, SumTerms
from nufed.flower.app.secure_sum.words import Words, add, mask, subtract


def routed(sealed: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
    """The encrypted shares by receiver, from those by sender, among the sites that sent any."""
    return {
        receiver: {
            sender: texts[receiver] for sender, texts in sealed.items() if sender != receiver
        }
        for receiver in sealed
    }


def unmasked_sum(
    terms: SumTerms,
    adverts: Mapping[int, Advert],
    shared: frozenset[int],
    masked: Mapping[int, Words],
    unmaskings: Mapping[int, Unmasking],
) -> Words:
    """The sum of the words of all sites in ``masked``.

    Args:
        terms: of this attempt.
        adverts: public keys by site.
        shared: the sites whose shares were passed on, and so are in the others' masks.
        masked: masked words by site.
        unmaskings: what sites returned in the last phase.
    """
    terms.check_enough(len(unmaskings), "returned their shares")
    survivors = sorted(masked)
    total = masked[survivors[0]]
    for site in survivors[1:]:
        total = add(total, masked[site])
    for site in survivors:
        key = _recovered(terms, [u.own.get(site) for u in unmaskings.values()], site)
        if hashlib.sha256(key).digest() != adverts[site].commitment:
            raise SecureSumError(f"the shares of site {site}'s mask do not recover it")
        total = subtract(total, mask(key, total.shape))
    for lost in sorted(shared - masked.keys()):
        private = _recovered(terms, [u.masking.get(lost) for u in unmaskings.values()], lost)
        if len(private) != 32 or public_of(private) != adverts[lost].masking:
            raise SecureSumError(f"the shares of site {lost}'s masking key do not recover it")
        for site in survivors:
            pair = pairwise_mask(terms, lost, private, site, adverts[site].masking, total)
            # the survivor's mask with the lost site remains in the sum
            total = subtract(total, pair) if site < lost else add(total, pair)
    return total


def _recovered(terms: SumTerms, shares: list[bytes | None], site: int) -> bytes:
    found = [share for share in shares if share is not None]
    try:
        if len(found) < terms.threshold:
            raise ValueError
        return combine_shares(found[: terms.threshold])
    except (ValueError, IndexError) as error:
        raise SecureSumError(f"the shares of site {site}'s secrets can't be combined") from error
