"""All names that a configuration accepts, for ``nufed list`` and shell completion, without torch.

``catalogue.json`` is written from the registries, the schema and the algorithms by
``docs/describe_algorithms.py``; a test holds it equal to them. Where installed packages add names
by entry points, the registries themselves are read, which imports torch and those packages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

import typer

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
    return Catalogue(**json.loads((files("nufed.lab.cli") / FILE).read_text("utf-8")))


def live_catalogue() -> Catalogue:
    """The catalogue, made from the registries, the schema and the algorithms."""
    from nufed.algorithms import ALGORITHMS
    from nufed.lab.cli.listing import about, listing, values

    return Catalogue(listing(), {name: about(name) for name in ALGORITHMS.working()}, values())


def listing_of(what: str) -> Listing:
    """One kind of names, or one algorithm with its settings."""
    if is_code(what) or what in installed().get("nufed.algorithms", {}):
        from nufed.lab.cli.listing import about

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


RUN_FILE = "run.json"


def complete_source(incomplete: str) -> list[str]:
    """Presets, and configuration files."""
    folder = files("nufed") / "lab" / "config" / "presets"  # its package imports torch
    shipped = [*folder.iterdir()]
    inside = [
        (f"{each.name}/", file) for each in shipped if each.is_dir() for file in each.iterdir()
    ]
    every = [*inside, *(("", each) for each in shipped if each.is_file())]
    presets = sorted(group + preset.name.removesuffix(".toml") for group, preset in every)
    return [*_starting(presets, incomplete), *_paths(incomplete, "*.toml")]


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """A key with ``=``, or the values of one.

    bash splits words at ``=`` and passes the parts, other shells the whole word.
    """
    last = [str(word) for word in ctx.params.get("overrides") or ()][-2:]
    if last and last[-1] == "=":
        return _starting(values_of(last[0]), incomplete)
    if last and last[-1] in catalogue().values and "=" not in incomplete:
        return _starting(values_of(last[-1]), incomplete)
    key, equals, start = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in _starting(values_of(key), start)]
    keys = _starting(catalogue().values, incomplete)
    if len(keys) > 1:
        return [f"{key}=" for key in keys]
    # several candidates: the shell completes to "key=" without a space behind it
    return [f"{key}={value}" for key in keys for value in ("", *values_of(key))]


def complete_listed(incomplete: str) -> list[str]:
    """Algorithms, and kinds of names."""
    names = catalogue().names
    return _starting(
        [*names["algorithms"], *(kind for kind in names if " " not in kind)], incomplete
    )


def complete_data_set(incomplete: str) -> list[str]:
    """Data sets by name."""
    return _starting(
        [name for name in catalogue().names["datasets"] if name not in ("file", "table")],
        incomplete,
    )


def complete_run(incomplete: str) -> list[str]:
    """Run directories."""
    return list(_runs(incomplete))


def complete_bounds(incomplete: str) -> list[str]:
    """Run directories, and files of constants."""
    return [*_runs(incomplete), *_paths(incomplete, "*.toml")]


def complete_advised(incomplete: str) -> list[str]:
    """Run directories, presets and configuration files."""
    return [*_runs(incomplete), *complete_source(incomplete)]


def complete_bundle(incomplete: str) -> list[str]:
    """Bundles, also those of runs."""
    of_runs = [str(p) for run in _runs("") for p in sorted(Path(run).glob("bundles/*.nufed"))]
    return [*_paths(incomplete, "*.nufed"), *_starting(of_runs, incomplete)]


def complete_method(ctx: typer.Context, incomplete: str) -> list[str]:
    """The methods of the run that is named before."""
    run = ctx.params.get("run") or next(iter(ctx.args), "")  # an unfinished option hides it
    folder = Path(run) / "methods"
    return _starting(sorted(p.name for p in folder.glob("*") if p.is_dir()), incomplete)


def values_of(key: str) -> list[str]:
    """The values of a configuration key that have names; of numbers the default."""
    table, _, name = key.rpartition(".")
    return catalogue().values.get(f"method.{name}" if table.startswith("methods.") else key, [])


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _paths(incomplete: str, pattern: str) -> list[str]:
    """The files of a pattern in the directory that the word names so far."""
    folder = incomplete[: incomplete.rfind("/") + 1]
    return _starting((folder + p.name for p in sorted(Path(folder).glob(pattern))), incomplete)


def _runs(incomplete: str) -> Iterator[str]:
    """Run directories that the word names so far, and those one level below them."""
    for name in _paths(incomplete, "*"):
        if (Path(name) / RUN_FILE).is_file():
            yield name
        elif Path(name).is_dir():
            yield from (f"{name}/{p.parent.name}" for p in sorted(Path(name).glob(f"*/{RUN_FILE}")))
