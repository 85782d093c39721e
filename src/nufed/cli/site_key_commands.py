"""The commands ``nufed federate register``, ``rotate`` and ``revoke``: parsing and printing only.

They edit the registry of sites in the server's folder of keys; a running server applies it.
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from nufed.cli.terminal import say
from nufed.errors import InputError

Keys = Annotated[
    Path, typer.Option(help="The server's folder of keys, which holds the registry sites.toml.")
]
KeyFile = Annotated[Path, typer.Argument(help="The site's public key, FILE.pub.")]
SiteName = Annotated[str, typer.Argument(help="The site's number or name.", metavar="SITE")]
KEYS = Path("keys")
APPLIES = "a running server applies it within seconds"


def register_site(
    key: KeyFile,
    number: Annotated[int, typer.Option(min=0, help="The site's number, from 0.")],
    name: Annotated[str, typer.Option(help="The site's name in results.")],
    keys: Keys = KEYS,
) -> None:
    """Register a site at the server: its number and name with its public key."""
    from nufed.flower.ops.registration import register_site

    shown = register_site(keys, number, name, key)
    say(f"registered: site {number} ({name!r}) with key {shown}; {APPLIES}")


def rotate(
    site: SiteName,
    key: Annotated[Path | None, typer.Argument(help="The new public key, NEW.pub.")] = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Revoke the old key, once the site uses the new one.")
    ] = False,
    keys: Keys = KEYS,
) -> None:
    """Replace a site's key without a gap: both are valid until --finish."""
    from nufed.flower.ops.registration import add_key, revoke_old_key

    if finish == (key is not None):
        raise InputError("give either the new key, NEW.pub, or --finish to revoke the old one")
    if key is not None:
        say(
            f"added: key {add_key(keys, site, key)}; start the site with it, then run `nufed "
            f"federate rotate {quote(site)} --finish --keys {quote(str(keys))}`; {APPLIES}"
        )
    else:
        say(f"revoked: the old key {revoke_old_key(keys, site)}; {APPLIES}")


def revoke(site: SiteName, keys: Keys = KEYS) -> None:
    """Remove a site from the registry and revoke its keys, also during a run."""
    from nufed.flower.ops.registration import revoke_site

    found = revoke_site(keys, site)
    say(f"revoked: site {found.number} ({found.name!r}) and its keys; {APPLIES}")


def register(app: typer.Typer) -> None:
    app.command("register")(register_site)
    app.command()(rotate)
    app.command()(revoke)
