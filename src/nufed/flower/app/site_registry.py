"""The server's registry of sites: number, name and public keys of each, in one TOML file.

::

    revoked = ["SHA256:..."]        # fingerprints of keys that are never admitted again

    [[site]]
    number = 0
    name = "Ward 3"
    keys = ["ecdsa-sha2-nistp384 AAAA..."]      # while a key is rotated two, the newest last

``nufed federate register``, ``rotate`` and ``revoke`` write it. A running server applies changes.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self

import tomli_w
from pydantic import AfterValidator, Field, ValidationError, model_validator

from nufed.errors import InputError, shown
from nufed.files import write_durably
from nufed.flower.app.payload import MAX_NAME_LENGTH
from nufed.flower.app.signatures import checked_public, fingerprint
from nufed.runs.records import Record

SITES = "sites.toml"
NODES = "nodes.json"  # in the server's FLWR_HOME: Flower's node ids -> keys' fingerprints
SITES_VARIABLE = "NUFED_SITES"  # the registry's path, in the environment of the ServerApp


def _checked_name(name: str) -> str:
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable() or name.isdecimal():
        raise ValueError(
            f"a name is one line of 1 to {MAX_NAME_LENGTH} characters, and not a number"
        )
    return name


class RegisteredSite(Record):
    """A site: its number from 0, its name, and its public keys, the newest last."""

    number: Annotated[int, Field(ge=0)]
    name: Annotated[str, AfterValidator(_checked_name)]
    keys: Annotated[
        list[Annotated[str, AfterValidator(checked_public)]], Field(min_length=1, max_length=2)
    ]

    def label(self, key: str) -> str:
        """How logs name it, with the fingerprint of the key that it uses."""
        return f"site {self.number} ({self.name!r}, key {key})"


class SiteRegistry(Record):
    """All registered sites, and the fingerprints of revoked keys."""

    revoked: list[str] = Field(default_factory=list)
    site: list[RegisteredSite] = Field(default_factory=list)

    @model_validator(mode="after")
    def _unique(self) -> Self:
        keys = [key for key, _, _ in self.entries()]
        for what, values in (
            ("number", [site.number for site in self.site]),
            ("name", [site.name for site in self.site]),
            ("key", [*keys, *dict.fromkeys(self.revoked)]),
        ):
            twice = [value for value, times in Counter(values).items() if times > 1]
            if twice:
                also = " or revoked" if what == "key" else ""
                raise ValueError(f"the {what} {twice[0]} is registered twice{also}")
        return self

    def entries(self) -> Iterator[tuple[str, str, RegisteredSite]]:
        """Every admitted key: its fingerprint, the public key, and its site."""
        for site in self.site:
            for public in site.keys:
                yield fingerprint(public), public, site

    def find(self, key: str) -> tuple[str, RegisteredSite] | None:
        """The public key with this fingerprint and its site; None if it is not admitted."""
        return next(
            ((public, site) for found, public, site in self.entries() if found == key), None
        )

    def named(self, number_or_name: str) -> RegisteredSite:
        """The site with this number or name."""
        for site in self.site:
            if number_or_name in (str(site.number), site.name):
                return site
        raise InputError(
            f"no site {number_or_name!r} is registered; registered are "
            + (", ".join(f"{site.number} ({site.name!r})" for site in self.site) or "none")
        )


def read_sites(path: Path) -> SiteRegistry:
    """The registry in a file, validated."""
    try:
        if path.stat().st_mode & 0o022:
            raise InputError(f"{path} is writable by other users: run chmod 644 {path}")
        return validated(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise InputError(
            f"the registry {path} can't be read ({error.strerror}): register sites with `nufed "
            "federate register`"
        ) from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the registry {path} is invalid: {error}") from None


def validated(content: dict[str, Any]) -> SiteRegistry:
    """The registry with this content; raises ValueError with one sentence."""
    try:
        return SiteRegistry.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{shown(where)[1:-1]}: {what}" if where else what) from None


def write_sites(path: Path, registry: SiteRegistry) -> None:
    """Replace the file atomically."""
    write_durably(path, tomli_w.dumps(registry.model_dump(), multiline_strings=False).encode())
    path.chmod(0o644)  # public keys; the server's user must be able to read it
