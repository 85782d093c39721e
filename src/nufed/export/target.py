"""What a target of ``nufed export`` is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
        write: writes a run to a path and returns what was written, one line each, as printed.
        default: the path to write to where none is given, from the run.
        chooses: whether ``method`` and ``seed`` may be chosen; else they are refused.
    """

    write: Callable[[Run, Path, Chosen], list[str]]
    default: Callable[[Run], Path]
    chooses: bool = False
