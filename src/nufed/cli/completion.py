"""Shell completion: presets, configuration keys and their values, algorithms, runs, bundles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path

import typer

from nufed.cli.catalogue import catalogue

RUN_FILE = "run.json"


def complete_source(incomplete: str) -> list[str]:
    """Presets, and configuration files."""
    folder = files("nufed") / "config" / "presets"  # its package imports torch
    presets = sorted(preset.name.removesuffix(".toml") for preset in folder.iterdir())
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
    return _starting([name for name in catalogue().names["datasets"] if name != "file"], incomplete)


def complete_run(incomplete: str) -> list[str]:
    """Run directories."""
    return list(_runs(incomplete))


def complete_bounds(incomplete: str) -> list[str]:
    """Run directories, and files of constants."""
    return [*_runs(incomplete), *_paths(incomplete, "*.toml")]


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
    found = (folder + path.name for path in sorted(Path(folder).glob(pattern)))
    return _starting(found, incomplete)


def _runs(incomplete: str) -> Iterator[str]:
    """Run directories that the word names so far, and those one level below them."""
    for name in _paths(incomplete, "*"):
        if (Path(name) / RUN_FILE).is_file():
            yield name
        elif Path(name).is_dir():
            yield from (f"{name}/{p.parent.name}" for p in sorted(Path(name).glob(f"*/{RUN_FILE}")))
