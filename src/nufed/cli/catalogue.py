"""All names that a configuration accepts, for ``nufed list`` and shell completion, without torch.

``catalogue.json`` is written from the registries, the schema and the algorithms by
``docs/describe_algorithms.py``; a test holds it equal to them. Where installed packages add names
by entry points, the registries themselves are read, which imports torch and those packages.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

from nufed.errors import InputError, shown
from nufed.registry import installed, is_code, suggest

FILE = "catalogue.json"
Listing: TypeAlias = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Catalogue:
    """Names with a one-line description by kind; algorithms with settings; values by key."""

    names: Listing
    algorithms: dict[str, Listing]
    values: dict[str, list[str]]


@cache
def catalogue() -> Catalogue:
    """The names of nufed and of installed packages."""
    if installed():
        return live_catalogue()
    return Catalogue(**json.loads((files("nufed.cli") / FILE).read_text("utf-8")))


def live_catalogue() -> Catalogue:
    """The same from the registries, the schema and the algorithms."""
    from nufed.algorithms import ALGORITHMS
    from nufed.cli.listing import about, listing, values

    return Catalogue(listing(), {name: about(name) for name in ALGORITHMS.working()}, values())


def listing_of(what: str) -> Listing:
    """One kind of names, or one algorithm with its settings."""
    if is_code(what) or what in installed().get("nufed.algorithms", {}):
        from nufed.cli.listing import about

        return about(what)
    names = catalogue().names
    algorithms = names["algorithms"]
    if what in algorithms:
        return catalogue().algorithms[what]
    kind = {name.removesuffix("s"): name for name in names}.get(what.removesuffix("s"))
    if kind is None:
        raise InputError(
            f"{shown(what)} is neither an algorithm ({', '.join(algorithms)}) nor a kind "
            f"({', '.join(names)})" + suggest(what, [*algorithms, *names])
        )
    return {kind: names[kind]}


def write_catalogue() -> None:
    """Write the table anew, after a change of names, settings or descriptions."""
    text = json.dumps(asdict(live_catalogue()), indent=1, ensure_ascii=False)
    Path(__file__).with_name(FILE).write_text(text + "\n", "utf-8")
