"""Shell completion: presets, configuration keys and their values, algorithms, runs, bundles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer

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
    if last and last[-1] in _keys() and "=" not in incomplete:
        return _starting(values_of(last[-1]), incomplete)
    key, equals, start = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in _starting(values_of(key), start)]
    keys = _starting(_keys(), incomplete)
    if len(keys) > 1:
        return [f"{key}=" for key in keys]
    # several candidates: the shell completes to "key=" without a space behind it
    return [f"{key}={value}" for key in keys for value in ("", *values_of(key))]


def complete_listed(incomplete: str) -> list[str]:
    """Algorithms, and kinds of names."""
    from nufed.algorithms import ALGORITHMS
    from nufed.cli.listing import listing

    kinds = [kind for kind in listing() if " " not in kind]
    return _starting([*ALGORITHMS, *kinds], incomplete)


def complete_data_set(incomplete: str) -> list[str]:
    """Data sets by name."""
    from nufed.data import SOURCES

    return _starting([name for name in SOURCES if name != "file"], incomplete)


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
    from nufed.algorithms import ALGORITHMS
    from nufed.cli.listing import value_fields
    from nufed.config.describe import every_setting

    names = _names()
    if key in names:
        return list(names[key])
    fields = value_fields()
    if key in fields:
        return _field_values(fields[key])
    table, _, name = key.rpartition(".")
    if table != "method" and not table.startswith("methods."):
        return []
    if name == "algorithm":
        return list(ALGORITHMS)
    found: dict[str, None] = {}
    for cls in ALGORITHMS.working().values():
        for field, _ in every_setting(cls):
            if field.name == name:
                found |= dict.fromkeys(field.values())
    return list(found)


def _names() -> dict[str, Iterable[str]]:
    """The values of keys that are names."""
    from nufed.algorithms.attacks import ATTACKS
    from nufed.config.build import LOSSES
    from nufed.data import PARTITIONS, SHIFTS, SOURCES
    from nufed.evaluate import METRICS
    from nufed.models import MODELS

    return {
        "data.source": SOURCES,
        "data.partition": ("auto", *PARTITIONS),
        "data.shift": ("none", *SHIFTS),
        "model.name": MODELS,
        "loss": ("auto", *LOSSES),
        "metric": ("auto", *METRICS),
        "faults.attack": ATTACKS,
    }


def _field_values(field: Any) -> list[str]:
    from nufed.cli.listing import choices_of

    if field.annotation is bool:
        return ["true", "false"]
    default = field.get_default()
    plain = isinstance(default, int | float | str)
    return [str(value) for value in choices_of(field.annotation)] or [str(default)] * plain


def _keys() -> list[str]:
    from nufed.cli.listing import listing

    return list(listing()["configuration keys"])


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
