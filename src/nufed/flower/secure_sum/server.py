"""The server's half of a secure sum: five messages to every site.

It relays keys and shares, adds what arrives, and removes masks.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from flwr.app import ConfigRecord, MessageType, RecordDict

from nufed.algorithms.protocol import Cost, State, SummedUpdates
from nufed.errors import UpdateError
from nufed.flower.app.payload import (
    ABOUT,
    ARRAYS,
    MAX_GRADIENTS,
    OFFLINE,
    PayloadError,
    Reply,
    check_agent,
    check_keys,
    read_about,
    read_int,
    usable,
)
from nufed.flower.internals import combine_shares
from nufed.flower.logs import LOG
from nufed.flower.secure_sum.masking import Advert, Unmasking, pairwise_mask, public_of
from nufed.flower.secure_sum.messages import (
    ADVERTISE,
    CONFIRM,
    MASKED,
    SECURE,
    SHARE,
    UNMASK,
    Adverts,
    Confirmation,
    Confirmations,
    SealedShares,
    Survivors,
    read_secure,
    read_words,
    secure_record,
)
from nufed.flower.secure_sum.terms import SecureSumError, SumTerms
from nufed.flower.secure_sum.words import Words, add, decode_means, mask, shape_of, subtract


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
    given = [share for share in shares if share is not None]
    try:
        if len(given) < terms.threshold:
            raise ValueError
        return combine_shares(given[: terms.threshold])
    except (ValueError, IndexError) as error:
        raise SecureSumError(f"the shares of site {site}'s secrets can't be combined") from error


Replies: TypeAlias = tuple[Mapping[int, Reply], list[int]]
Send: TypeAlias = Callable[[str, Iterable[int], Callable[[int], ConfigRecord]], Replies]
Charge: TypeAlias = Callable[[int, Mapping[str, object]], Mapping[str, object]]
Found = TypeVar("Found")


@dataclass
class SecureRound:
    """One attempt at a round.

    Args:
        terms: of this attempt, with a fresh random id.
        before: the server's vectors that agents send a replacement for.
        send: sends a message (its action, the agents, each agent's record) and returns the replies
            and the agents that are offline.
        charge: takes the record of a noisy update from a reply, for the privacy account, if any.
        who: names the site of an agent in errors.

    ``failed``, ``dropped``, ``cost`` and ``began`` describe the round once :meth:`run` returns.
    """

    terms: SumTerms
    before: State
    send: Send
    charge: Charge | None = None
    who: Callable[[int], str] = "site {}".format
    failed: list[UpdateError] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)
    began: dict[int, int] = field(default_factory=dict)

    def run(self) -> SummedUpdates:
        """The means over the sites that sent their masked update.

        Raises:
            SecureSumError: too few sites replied; nothing about their updates is known.
        """
        terms, run, attempt = self.terms, self.terms.run, self.terms.attempt
        adverts = self._ask(ADVERTISE, terms.sites, lambda _: terms, _reads(Advert))
        terms.check_enough(len(adverts), "sent their keys")
        to_all = Adverts(run, attempt, adverts)
        sealed = self._ask(SHARE, adverts, lambda _: to_all, self._read_shares(set(adverts)))
        terms.check_enough(len(sealed), "sent their shares")
        boxes = routed(sealed)
        masked = self._ask(
            MASKED, sealed, lambda site: SealedShares(run, attempt, boxes[site]), self._read_masked
        )
        terms.check_enough(len(masked), "sent their update")
        survivors = Survivors(run, attempt, tuple(sorted(masked)))
        left_out = list(self.failed)
        confirmed = self._ask(CONFIRM, masked, lambda _: survivors, _reads(Confirmation))
        signatures = {site: each.signature for site, each in confirmed.items()}
        terms.check_enough(len(signatures), "confirmed the sum")
        all_signed = Confirmations(run, attempt, signatures)
        released = self._ask(UNMASK, signatures, lambda _: all_signed, _reads(Unmasking))
        for error in self.failed[len(left_out) :]:
            LOG.warning("shares left out: %s", error)
        total = unmasked_sum(terms, adverts, frozenset(sealed), masked, released)
        self.failed = left_out  # the updates of the others are in the sum
        means = decode_means(total, self.before, len(masked))
        return SummedUpdates(survivors.sites, means)

    def _ask(
        self,
        action: str,
        sites: Iterable[int],
        make: Callable[[int], object],
        read: Callable[[int, RecordDict], Found],
    ) -> dict[int, Found]:
        """The sites' replies; sites without a valid one are added to ``failed``."""
        kind = f"{MessageType.TRAIN}.{action}"
        replies, offline = self.send(kind, sites, lambda site: secure_record(make(site)))
        if action == ADVERTISE:
            self.dropped = offline
        else:
            replies = {**replies, **dict.fromkeys(offline, OFFLINE)}
        answers = {}
        for site, reply in replies.items():
            try:
                answers[site] = read(site, usable(reply))
            except PayloadError as error:
                round, who = self.terms.round, self.who(site)
                self.failed.append(UpdateError(site, round, str(error), error.fault, who))
        return answers

    def _read_shares(self, sites: set[int]) -> Callable[[int, RecordDict], Mapping[int, bytes]]:
        def read(site: int, reply: RecordDict) -> Mapping[int, bytes]:
            sealed = _reads(SealedShares)(site, reply).sealed
            if sealed.keys() != sites - {site}:
                raise PayloadError("it sent shares for other sites than those with keys")
            return sealed

        return read

    def _read_masked(self, site: int, records: RecordDict) -> Words:
        reply = self.charge(site, records) if self.charge else records
        check_keys(reply, ARRAYS, ABOUT)
        claimed, round, gradients, hvps, began = read_about(
            reply, "agent", "round", "gradients", "hvps", "began"
        )
        check_agent(claimed, site)
        if round != self.terms.round:
            raise PayloadError("its update is of another round")
        words = read_words(reply, shape_of(self.before, len(self.terms.sites)))
        cost = Cost(*(read_int(value, "gradients", MAX_GRADIENTS) for value in (gradients, hvps)))
        self.began[site] = read_int(began, "began", 10**9)
        self.cost += cost
        return words


def _reads(kind: type[Found]) -> Callable[[int, RecordDict], Found]:
    """Reads replies that are one message of the protocol."""

    def read(site: int, reply: RecordDict) -> Found:
        check_keys(reply, SECURE)
        return read_secure(reply, kind)

    return read


def new_attempt() -> str:
    """A random id of an attempt."""
    return secrets.token_hex(16)
