"""The terms of one secure sum, equal at the server and at every site."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass

from pydantic import ConfigDict, with_config

from nufed.errors import TrainingError
from nufed.lab.files import canonical

PROTOCOL = 2  # version: since 2, confirmations cover all keys, and attempt ids are used once
MIN_SITES = 3  # with the sum of two, each of them knows the other's update
# of dataclasses that are sent or stored as JSON
as_json = with_config(
    ConfigDict(ser_json_bytes="hex", val_json_bytes="hex", extra="forbid", strict=True)
)


class SecureSumError(TrainingError):
    """A message of the protocol is refused; says why, without any secret."""


@as_json
@dataclass(frozen=True)
class SumTerms:
    """An attempt at a secure sum.

    Args:
        run: id of the run.
        round: its round.
        attempt: random id of this attempt, 32 hexadecimal digits; a retry has another one, and a
            site refuses one that it has seen.
        sites: numbers of the round's cohort, sorted.
    """

    run: str
    round: int
    attempt: str
    sites: tuple[int, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{32}", self.attempt):
            raise SecureSumError("the id of an attempt must be 32 hexadecimal digits")
        if len(set(self.sites)) != len(self.sites) or list(self.sites) != sorted(self.sites):
            raise SecureSumError("the sites of a secure sum must be sorted and distinct")
        if len(self.sites) < MIN_SITES:
            raise SecureSumError(
                f"a sum over {len(self.sites)} sites is refused: it needs {MIN_SITES} or more"
            )

    @property
    def threshold(self) -> int:
        """Shares that recover a secret, and the fewest sites of a sum."""
        return threshold(len(self.sites))

    @property
    def digest(self) -> bytes:
        """Binds keys, signatures and ciphertexts to this attempt."""
        return hashlib.sha256(canonical("nufed secure sum", PROTOCOL, asdict(self))).digest()

    def check_enough(self, sites: int, what: str) -> None:
        """Refuse to continue with too few sites."""
        if sites < self.threshold:
            raise SecureSumError(
                f"only {sites} of {len(self.sites)} sites {what}: a secure sum needs "
                f"{self.threshold}"
            )


def threshold(sites: int) -> int:
    """⌈2n/3⌉, at least 3.

    A third of the n sites may drop out. Two groups of so many have n/3 sites in common: a server
    that names different dropouts to different sites never gets both secrets of one, unless
    a third of the sites collude with it.

    >>> [threshold(sites) for sites in (3, 4, 6, 9, 10)]
    [3, 3, 4, 6, 7]
    """
    return max(MIN_SITES, -(-2 * sites // 3))
