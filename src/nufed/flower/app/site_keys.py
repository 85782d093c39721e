"""The public keys of all sites, as sites know them: from the configuration, not from the server."""

from __future__ import annotations

from dataclasses import dataclass

from nufed.errors import InputError, shown
from nufed.flower.app.signatures import checked_public, verify

SECURE_SUM = "secure sum"  # the purpose of signatures under secure aggregation


@dataclass(frozen=True)
class SiteKeys:
    """The public keys of all sites, by number, as lines of their ``.pub`` files."""

    lines: tuple[str, ...]

    def __post_init__(self) -> None:
        for number, line in enumerate(self.lines):
            try:
                checked_public(line)
            except ValueError:
                raise InputError(
                    f"federation.site_keys[{number}] = {shown(line)}: must be the line of a .pub "
                    "file that `nufed federate key` made"
                ) from None
        if len({checked_public(line) for line in self.lines}) != len(self.lines):
            raise InputError("federation.site_keys has a key twice: every site has its own")

    def verify(self, site: int, message: bytes, signature: bytes) -> bool:
        """Whether a site's key signed a message for a secure sum."""
        if not 0 <= site < len(self.lines):
            return False
        return verify(self.lines[site], SECURE_SUM, message, signature)
