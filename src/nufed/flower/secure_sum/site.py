"""The site's answers to the messages of secure aggregation, and its secrets between them.

They are in one file per run, written before a reply is sent: a phase is never answered twice, so no
mask is used twice, and the ids of attempts are listed there, so none is used twice. Another file
lists the sites of every sum that this site helped to unmask, by seed and round, over all runs: a
second sum of a round (the server crashed, or a run is started again with the same seed) is unmasked
only over the same sites, whatever its run, method and model, since updates of one seed and round
can be equal, and the difference of two sums would reveal single ones. A site that has unmasked a
sum takes no part in cohorts without the sites of that sum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from flwr.app import ArrayRecord, RecordDict
from pydantic import ValidationError

from nufed.algorithms.protocol import State
from nufed.errors import InputError, RunError
from nufed.flower.app.payload import read_run
from nufed.flower.app.registry import SECURE_SUM, SiteKeys
from nufed.flower.app.signatures import checked_public, sign
from nufed.flower.app.site import Site
from nufed.flower.secure_sum.masking import (
    Secrets,
    advertise,
    confirm,
    masked,
    share,
    signed_message,
    unmask,
)
from nufed.flower.secure_sum.messages import (
    PROTOCOL_KEY,
    SECURE,
    Adverts,
    Confirmation,
    Confirmations,
    SealedShares,
    Survivors,
    adapter,
    read_secure,
    secure_record,
    words_record,
)
from nufed.flower.secure_sum.terms import PROTOCOL, SecureSumError, SumTerms, as_json
from nufed.flower.secure_sum.words import encode
from nufed.lab.files import canonical, locked, make_private, read_sealed, sha256, write_sealed

SUMS = "secure-sums-"  # files in a site's folder, with its number


@as_json
@dataclass(frozen=True)
class SecureRecord:
    """The secrets of the current attempt, and the ids of all attempts of the run."""

    secrets: Secrets | None = None
    attempts: tuple[str, ...] = ()
    protocol: int = PROTOCOL


@as_json
@dataclass(frozen=True)
class SummedSites:
    """The sites of a sum: their numbers, and the digest of their keys, since another app may give
    their numbers to others."""

    sites: tuple[int, ...]
    keys: str


@as_json
@dataclass(frozen=True)
class UnmaskedSums:
    """The sites of unmasked sums, by seed and round."""

    seeds: Mapping[int, Mapping[int, SummedSites]] = field(default_factory=dict)
    protocol: int = PROTOCOL


Kept = TypeVar("Kept", SecureRecord, UnmaskedSums)


def advertise_keys(site: Site, request: RecordDict) -> RecordDict:
    """Phase 1; discards the secrets of an earlier attempt."""
    keys, terms, agent = _site_keys(site), read_secure(request, SumTerms), site.agent
    plan, path = site.plan, _path(site, terms.run)
    if len(terms.sites) != plan.cohort or not set(terms.sites) <= set(plan.seen):
        raise SecureSumError(
            f"the sum is over {len(terms.sites)} sites, not over a cohort of {plan.cohort}"
        )
    if not 1 <= terms.round <= plan.rounds:  # also bounds the files
        raise SecureSumError(f"the sum is of round {terms.round}, not of 1 … {plan.rounds}")
    key = _private_key(site)
    with _only_one(site):
        for summed in _sums_of(site, terms.round):
            same = summed.keys == _keys_of(site, summed.sites)
            if not same or not set(summed.sites) <= set(terms.sites):
                raise _other_sites(site, terms.round, summed, terms.sites)
        attempts = _load(path, SecureRecord()).attempts
        if terms.attempt in attempts:
            raise SecureSumError("the id of this attempt was used before: a retry needs another")
        most = 1000 + 10 * plan.rounds
        if len(attempts) >= most:
            raise SecureSumError(
                f"this site has taken part in {most} attempts of this run, which is the most that "
                "it lists: start a new run"
            )
        held, advert = advertise(terms, agent, lambda message: sign(key, SECURE_SUM, message))
        if not keys.verify(agent, signed_message(terms, agent, advert), advert.signature):
            raise InputError(
                f"this site's key is not federation.site_keys[{agent}]: start the site with that "
                "key; or, if its key was rotated, put the line of the new .pub file there, have "
                "every site approve the app again, and start a new run with another seed"
            )
        _save(path, SecureRecord(held, (*attempts, terms.attempt)))
    return RecordDict({SECURE: secure_record(advert)})


def share_secrets(site: Site, request: RecordDict) -> RecordDict:
    """Phase 2."""
    message = read_secure(request, Adverts)
    with _only_one(site):
        path, record, held = _current(site, message.run, message.attempt)
        held, sealed = share(held, message.adverts, _site_keys(site).verify)
        _save(path, replace(record, secrets=held))
    return RecordDict({SECURE: secure_record(SealedShares(message.run, message.attempt, sealed))})


def mask_update(
    site: Site, request: RecordDict, round: int, vectors: State, received: State
) -> ArrayRecord:
    """Phase 3: the masked update of a round."""
    message = read_secure(request, SealedShares)
    with _only_one(site):
        path, record, held = _current(site, message.run, message.attempt)
        if held.terms.round != round:
            raise SecureSumError(
                f"the keys are of round {held.terms.round}, the request of {round}"
            )
        before = {name: received[name] for name in site.plan.algorithm.sent_in(round)}
        words = encode(vectors, before, len(held.terms.sites))
        held, total = masked(held, message.sealed, words)
        _save(path, replace(record, secrets=held))
    return words_record(total)


def confirm_sum(site: Site, request: RecordDict) -> RecordDict:
    """Phase 4."""
    survivors = read_secure(request, Survivors)
    key = _private_key(site)
    with _only_one(site):
        path, record, held = _current(site, survivors.run, survivors.attempt)
        held, signature = confirm(
            held, frozenset(survivors.sites), lambda message: sign(key, SECURE_SUM, message)
        )
        _save(path, replace(record, secrets=held))
    return RecordDict({SECURE: secure_record(Confirmation(signature))})


def unmask_sum(site: Site, request: RecordDict) -> RecordDict:
    """Phase 5."""
    message = read_secure(request, Confirmations)
    with _only_one(site):
        path, record, held = _current(site, message.run, message.attempt)
        sum_of = SummedSites(held.survivors, _keys_of(site, held.survivors))
        seed, round = site.plan.seed, held.terms.round
        for summed in _sums_of(site, round):
            if summed != sum_of:
                raise _other_sites(site, round, summed, held.survivors)
        held, released = unmask(held, message.signatures, _site_keys(site).verify)
        _save(path, replace(record, secrets=held))
        file = site.folder / f"{SUMS}{site.agent}"
        seeds = _load(file, UnmaskedSums()).seeds
        rounds = {**seeds.get(seed, {}), round: sum_of}
        _save(file, UnmaskedSums({**seeds, seed: rounds}))
    return RecordDict({SECURE: secure_record(released)})


def _sums_of(site: Site, round: int) -> Iterator[SummedSites]:
    """The sites of the sums of a round that were unmasked, in any run and under any number that
    this site had."""
    for file in sorted(site.folder.glob(f"{SUMS}*")):
        if PROTOCOL_KEY not in read_sealed(file).about:
            raise InputError(
                f"{file.name} in this site's folder lists sums of version 1 of secure aggregation, "
                "which do not say their rounds: set `seeds` in the configuration to a number that "
                "was never used, have every site approve the app again, and move that file away"
            )
        summed = _load(file, UnmaskedSums()).seeds.get(site.plan.seed, {}).get(round)
        if summed is not None:
            yield summed


def _other_sites(
    site: Site, round: int, summed: SummedSites, sites: tuple[int, ...]
) -> SecureSumError:
    changed = "" if summed.keys == _keys_of(site, summed.sites) else " with other keys"
    return SecureSumError(
        f"round {round} with seed {site.plan.seed} was summed over sites {list(summed.sites)}"
        f"{changed} before, in this or another run, and the difference to a sum over "
        f"{list(sites)} would reveal updates of few; use the same sites, or set `seeds` in the "
        "configuration to another number, and have every site approve the app again"
    )


def _keys_of(site: Site, sites: Iterable[int]) -> str:
    """The digest of the keys of sites."""
    lines = _site_keys(site).lines
    known = sorted(checked_public(lines[number]) for number in sites if number < len(lines))
    return sha256(canonical(known))


@contextmanager
def _only_one(site: Site) -> Iterator[None]:
    """Messages of several runs may be handled at the same time: one reads and writes files."""
    make_private(site.folder)
    with locked(site.folder, f".secure-lock-{site.agent}", wait=site.plan.deadline):
        yield


def _private_key(site: Site) -> Path:
    if site.key is None:
        raise InputError(
            "secure aggregation needs this site's key, and it runs without one: start it with "
            "--key and --ca, not with --insecure"
        )
    return site.key


def _site_keys(site: Site) -> SiteKeys:
    if site.plan.site_keys is None:
        raise InputError("this federation has no secure aggregation")
    return site.plan.site_keys


def _current(site: Site, run: str, attempt: str) -> tuple[Path, SecureRecord, Secrets]:
    """The file, its record and the secrets of the attempt that a request is about."""
    _site_keys(site)
    path = _path(site, run)
    record = _load(path, SecureRecord())
    held = record.secrets
    if held is None or (held.terms.run, held.terms.attempt) != (run, attempt):
        raise SecureSumError("the request is of another attempt than this site's keys")
    return path, record, held


def _path(site: Site, run: str) -> Path:
    return site.folder / read_run(run) / f"secure-agent-{site.agent}"


def _load(path: Path, empty: Kept) -> Kept:
    """The record in a file; ``empty`` if there is no file."""
    if not path.exists():
        return empty
    about = read_sealed(path).about
    if PROTOCOL_KEY not in about:  # secrets of version 1: nothing of theirs is valid any more
        return empty
    try:
        return adapter(type(empty)).validate_json(json.dumps(about))
    except ValidationError as error:
        raise RunError(f"{path} is damaged: {error.error_count()} invalid fields") from None


def _save(path: Path, record: Kept) -> None:
    make_private(path.parent.parent)
    make_private(path.parent)
    write_sealed(path, json.loads(adapter(type(record)).dump_json(record)))
