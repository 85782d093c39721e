"""What ``nufed export RUN --to NAME`` can write: the targets by name.

A target is one function in a file of its own. It imports the package that it needs itself, through
:func:`nufed.export.packages.needed`, so that nothing is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nufed.errors import InputError, shown
from nufed.registry import suggest
from nufed.runs import Run


@dataclass(frozen=True)
class Chosen:
    """What of a run is exported: None means all methods, or the first seed."""

    method: str | None = None
    seed: int | None = None
    trust: bool = False


@dataclass(frozen=True)
class Target:
    """A format or tool that runs are exported to.

    Args:
        about: one line for the help text.
        write: writes a run to a path and returns what was written, one line each, as printed.
        default: the path to write to where none is given, from the run.
        chooses: whether ``method`` and ``seed`` may be chosen; else they are refused.
    """

    about: str
    write: Callable[[Run, Path, Chosen], list[str]]
    default: Callable[[Run], Path]
    chooses: bool = False


TARGETS: Mapping[str, Target] = {}


def export(run: Run, to: str, out: Path | None = None, chosen: Chosen | None = None) -> list[str]:
    """Write a finished run for another tool.

    Args:
        run: from :func:`nufed.load_run`.
        to: the name of a target.
        out: where to write; by default a place of the target's own.
        chosen: method and seed, for targets that write one model.

    Returns:
        What was written, one line each.
    """
    if to not in TARGETS:
        raise InputError(
            f"--to {shown(to)}: must be one of {', '.join(TARGETS)}{suggest(to, TARGETS)}"
        )
    target, chosen = TARGETS[to], chosen or Chosen()
    if not target.chooses and (chosen.method is not None or chosen.seed is not None):
        raise InputError(f"--to {to} writes all methods and seeds: leave out --method and --seed")
    return target.write(run, out or target.default(run), chosen)
