"""The site's answers to the messages of secure aggregation, and its secrets between them.

They are in one file per run, written before a reply is sent: a phase is never answered twice, so no
mask is used twice. Another file lists the sites of every sum that this site helped to unmask, over
all runs: a second sum of the same updates (the server crashed, or a run is started again with the
same seed) is unmasked only over the same sites, since the difference would reveal single updates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from flwr.app import ArrayRecord, RecordDict
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save

from nufed.algorithms.protocol import State
from nufed.errors import InputError, RunError
from nufed.files import make_private, read_sealed, sha256, write_sealed
from nufed.flower.app.payload import read_run
from nufed.flower.app.secure_payload import SECURE, read_secure, secure_record, words_record
from nufed.flower.app.secure_sum.masking import (
    Secrets,
    advertise,
    confirm,
    masked,
    share,
    signed_message,
    unmask,
)
from nufed.flower.app.secure_sum.sum_messages import (
    Adverts,
    Confirmation,
    Confirmations,
    SealedShares,
    Survivors,
)
from nufed.flower.app.secure_sum.sum_terms import SecureSumError, SumTerms, as_json
from nufed.flower.app.secure_sum.words import encode
from nufed.flower.app.signatures import sign
from nufed.flower.app.site import Site
from nufed.flower.app.site_keys import SECURE_SUM, SiteKeys


@as_json
@dataclass(frozen=True)
class SecureRecord:
    """The secrets of the current attempt, and the digest of what its update was computed from."""

    secrets: Secrets | None = None
    request: str = ""


@as_json
@dataclass(frozen=True)
class UnmaskedSums:
    """The sites of unmasked sums, by the digest of what their updates were computed from."""

    sites: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


Kept = TypeVar("Kept", SecureRecord, UnmaskedSums)


def advertise_keys(site: Site, request: RecordDict) -> RecordDict:
    """Phase 1; discards the secrets of an earlier attempt."""
    keys, terms, agent = _site_keys(site), read_secure(request, SumTerms), site.agent
    path = _path(site, terms.run)
    if len(terms.sites) != site.plan.cohort or not set(terms.sites) <= set(site.plan.seen):
        raise SecureSumError(
            f"the sum is over {len(terms.sites)} sites, not over a cohort of {site.plan.cohort}"
        )
    key = _private_key(site)
    own, advert = advertise(terms, agent, lambda message: sign(key, SECURE_SUM, message))
    if not keys.verify(agent, signed_message(terms, agent, advert), advert.signature):
        raise InputError(
            f"this site's key is not federation.site_keys[{agent}]: start the site with that key; "
            "or, if its key was rotated, put the line of the new .pub file there, have every site "
            "approve the app again, and start a new run"
        )
    _save(path, SecureRecord(own))
    return RecordDict({SECURE: secure_record(advert)})


def share_secrets(site: Site, request: RecordDict) -> RecordDict:
    """Phase 2."""
    found = read_secure(request, Adverts)
    path, record, own = _current(site, found.run, found.attempt)
    own, sealed = share(own, found.adverts, _site_keys(site).verify)
    _save(path, replace(record, secrets=own))
    return RecordDict({SECURE: secure_record(SealedShares(found.run, found.attempt, sealed))})


def mask_update(
    site: Site, request: RecordDict, round: int, vectors: State, received: State
) -> ArrayRecord:
    """Phase 3: the masked update of a round."""
    found = read_secure(request, SealedShares)
    path, record, own = _current(site, found.run, found.attempt)
    if own.terms.round != round:
        raise SecureSumError(f"the keys are of round {own.terms.round}, the request of {round}")
    before = {name: received[name] for name in site.plan.algorithm.sent_in(round)}
    words = encode(vectors, before, len(own.terms.sites))
    own, total = masked(own, found.sealed, words)
    digest = sha256(f"{site.plan.seed}/{round}/".encode() + save(dict(received)))
    _save(path, replace(record, secrets=own, request=digest))
    return words_record(total)


def confirm_sum(site: Site, request: RecordDict) -> RecordDict:
    """Phase 4."""
    found = read_secure(request, Survivors)
    path, record, own = _current(site, found.run, found.attempt)
    key = _private_key(site)
    own, signature = confirm(
        own, frozenset(found.sites), lambda message: sign(key, SECURE_SUM, message)
    )
    _save(path, replace(record, secrets=own))
    return RecordDict({SECURE: secure_record(Confirmation(signature))})


def unmask_sum(site: Site, request: RecordDict) -> RecordDict:
    """Phase 5."""
    found = read_secure(request, Confirmations)
    path, record, own = _current(site, found.run, found.attempt)
    sites, all_runs = own.survivors, site.folder / f"secure-sums-{site.agent}"
    sums = _load(all_runs, UnmaskedSums())
    if sums.sites.get(record.request, sites) != sites:
        raise SecureSumError(
            f"a sum of these updates over sites {list(sums.sites[record.request])} was unmasked "
            f"before, and its difference to one over {list(sites)} would reveal updates of few; "
            "use the same sites, or start a run with another seed"
        )
    own, released = unmask(own, found.signatures, _site_keys(site).verify)
    _save(path, replace(record, secrets=own))
    _save(all_runs, UnmaskedSums({**sums.sites, record.request: sites}))
    return RecordDict({SECURE: secure_record(released)})


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
    own = record.secrets
    if own is None or (own.terms.run, own.terms.attempt) != (run, attempt):
        raise SecureSumError("the request is of another attempt than this site's keys")
    return path, record, own


def _path(site: Site, run: str) -> Path:
    return site.folder / read_run(run) / f"secure-agent-{site.agent}"


def _load(path: Path, empty: Kept) -> Kept:
    """The record in a file; ``empty`` if there is no file."""
    if not path.exists():
        return empty
    try:
        return TypeAdapter(type(empty)).validate_json(json.dumps(read_sealed(path).about))
    except ValidationError as error:
        raise RunError(f"{path} is damaged: {error.error_count()} invalid fields") from None


def _save(path: Path, record: Kept) -> None:
    make_private(path.parent.parent)
    make_private(path.parent)
    write_sealed(path, json.loads(TypeAdapter(type(record)).dump_json(record)))
