"""Code that a run directory names: imported only if the user trusts whoever made the directory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from nufed.errors import InputError
from nufed.runs.schema import Config


def named_code(config: Config) -> dict[str, str]:
    """Every ``package.module:function`` that a configuration names, by its key."""
    names = {
        "data.source": config.data.source,
        "model.name": config.model.name,
        "loss": config.loss,
        "metric": config.metric,
    }
    return {key: name for key, name in names.items() if ":" in name}


def require_trust(path: Path, config: Config, trust: bool, given: Collection[str] = ()) -> None:
    """Refuse the run directory ``path`` if its configuration names code, unless it is trusted.

    Args:
        path: the run directory.
        config: its configuration.
        trust: whether the user allows importing what it names.
        given: keys whose objects the user passes instead, so that nothing is imported for them.
    """
    named = {key: name for key, name in named_code(config).items() if key not in given}
    if named and not trust:
        listed = ", ".join(f"{key} = {name!r}" for key, name in named.items())
        raise InputError(
            f"{path} names code to import ({listed}): add --trust (in Python trust=True) if you "
            "would run the code of whoever made this directory"
        )
