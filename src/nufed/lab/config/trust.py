"""Code named in a run directory: imported only if the user trusts the directory's author."""

from __future__ import annotations

import sys
from pathlib import Path

from nufed.errors import InputError
from nufed.lab.config.schema import Config
from nufed.lab.readers.sources import source_of
from nufed.registry import import_named


def named_code(config: Config) -> dict[str, str]:
    """Every ``package.module:function`` or class that a configuration names, by its key."""
    names = {
        "data.source": source_of(config.data.source)[0],
        "data.partition": config.data.partition,
        "data.augment": config.data.augment,
        "model.name": config.model.name,
        "loss": config.loss,
        "metric": config.metric,
    }
    code = {key: name for key, name in names.items() if ":" in name and not name.startswith("hf:")}
    return code | code_of_methods(config)


def code_of_methods(config: Config) -> dict[str, str]:
    """The classes that methods name: algorithms, and choices such as aggregation rules."""
    tables = {"method": config.method}
    tables |= {f"methods.{name}": table for name, table in config.methods.items()}
    return {f"{t}.{key}": name for t, each in tables.items() for key, name in each.code().items()}


def methods_are_imported(config: Config) -> bool:
    """Whether all modules that methods name are imported already."""
    return all(name.partition(":")[0] in sys.modules for name in code_of_methods(config).values())


def import_methods(config: Config) -> None:
    """Import the classes that methods name."""
    for key, name in code_of_methods(config).items():
        import_named(key, name)


def require_trust(path: Path, config: Config, trust: bool) -> None:
    """Refuse the run directory ``path`` if its configuration names code, unless it is trusted.

    Args:
        path: the run directory.
        config: its configuration, with a note in the place of objects that the user passes, so that
            nothing is imported for them.
        trust: whether the user allows importing what it names.

    If trusted, classes that methods name are imported; other code is imported on use.
    """
    named = named_code(config)
    if named and not trust:
        listed = ", ".join(f"{key} = {name!r}" for key, name in named.items())
        raise InputError(
            f"{path} names code to import ({listed}): add --trust (in Python trust=True) if you "
            "trust the author of this directory to run code"
        )
    import_methods(config)
