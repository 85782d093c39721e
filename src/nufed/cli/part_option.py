"""The options of ``nufed run`` for several machines: ``--part`` of a job array, and ``--ray``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nufed.cli.terminal import say
from nufed.errors import InputError

if TYPE_CHECKING:
    from nufed.experiment.array_parts import Share
    from nufed.runs import Run

Part = Annotated[
    str | None,
    typer.Option(
        metavar="K/N",
        help="Train every N-th method and seed, from the K-th, in a directory that N processes "
        "share; `--resume` collects. Default in a Slurm job array: its task; `all`: the whole run.",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="auto|ADDRESS",
        help="Train on a cluster of Ray: the one of this machine, or of the head at HOST:PORT.",
    ),
]


def share_of(part: str | None, out: Path | None, resume: Path | None, tuned: bool) -> Share | None:
    """The part to train; None for the whole run.

    In a job array of Slurm the default is the part of this task, if it is given a directory.
    """
    from nufed.experiment.array_parts import parse_share, slurm_share

    if part is None:
        if out is None or resume is not None:
            return None
        share = slurm_share(os.environ)
        if share is not None:
            number, total = share
            say(
                f"part {number}/{total} of the run, from SLURM_ARRAY_TASK_ID; --part all trains "
                "the whole run",
                error=True,
            )
    elif part == "all":
        return None
    else:
        share = parse_share(part)
    if resume is not None:
        raise InputError(
            "--part and --resume: a part needs the configuration and --out DIR; --resume alone "
            "collects all parts"
        )
    if share is not None and tuned:
        raise InputError(
            "--part and --tuned: search first with `nufed tune`, then train the configuration that "
            "it writes with --part"
        )
    return share


def print_part(run: Run) -> None:
    """What is done of the run so far, and how to collect it."""
    from nufed.config.trust import named_code

    methods = run.config.algorithms()
    done, total = sum(map(len, run.methods.values())), len(methods) * len(run.config.seeds)
    trust = " --trust" if named_code(run.config) else ""
    command = f"nufed run --resume {shlex.quote(str(run.path))}{trust}"
    say(f"this part is done; {done} of {total} methods and seeds of {run.path} are done")
    say(f"when all parts are done, write the report: {command}")
