"""Several processes train the parts of one run, as a job array does on a shared file system.

Process k of n trains every n-th part, longest first. The directory's lock is held only while a
process starts; each part has a lock of its own while it is trained. `nufed run --resume` collects:
it refuses while a part is locked, trains what is missing and writes the report.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from nufed.errors import InputError, shown
from nufed.experiment.run_directories import begin_run
from nufed.experiment.run_parts import RunPart, parts_of
from nufed.experiment.setup import Setup
from nufed.files import locked, make_private
from nufed.runs import RunDirectory
from nufed.runs.provenance import Provenance

Share: TypeAlias = tuple[int, int]
"""The number of a process, from 1, and how many there are."""

LOCKS = "locks"
START_SECONDS = 300  # to wait while other processes start
SLURM = "SLURM_ARRAY_TASK_"


@dataclass(frozen=True)
class SharedRun:
    """A run that this process trains some parts of."""

    setup: Setup
    directory: RunDirectory
    parts: list[RunPart]


@contextmanager
def shared_run(setup: Setup, out: Path, share: Share) -> Iterator[SharedRun]:
    """Create the run, or join it if another process has; hold the locks of this process's parts."""
    parts = chosen_parts(parts_of(setup), share)
    directory = RunDirectory.shared(out)
    with ExitStack() as held:
        with locked(directory.path, wait=START_SECONDS):
            setup = _started(setup, directory)
            make_private(directory.path / LOCKS)
            for part in parts:
                held.enter_context(
                    locked(directory.path / LOCKS, f"{part.method}-seed-{part.seed}")
                )
        yield SharedRun(setup, directory, parts)


def _started(setup: Setup, directory: RunDirectory) -> Setup:
    """Write the start of the run; if it was written before, check that it is the same run."""
    if not (directory.path / "run.json").exists():
        begin_run(setup, directory)
        return setup
    provenance = Provenance(directory)
    splits = {seed: f.split.fingerprint for seed, f in setup.problem.federations.items()}
    provenance.check_same(setup.config, setup.samples.fingerprint, splits)
    provenance.write_resumed(setup.config)
    return replace(setup, engine_names=provenance.engines())


def end_sharing(directory: RunDirectory) -> None:
    """Refuse if a process still trains a part, else remove the locks of parts.

    The directory's lock must be held, without which no process locks a part.
    """
    folder = directory.path / LOCKS
    for path in sorted(folder.glob("*")):
        with locked(folder, path.name):
            pass
    shutil.rmtree(folder, ignore_errors=True)


def chosen_parts(parts: Sequence[RunPart], share: Share) -> list[RunPart]:
    """Every n-th part, longest first, so that processes get about the same work.

    >>> parts = [RunPart(0, name, work) for name, work in (("a", 1), ("b", 4), ("c", 2))]
    >>> [part.method for part in chosen_parts(parts, (1, 2))]
    ['b', 'a']
    """
    number, total = share
    return sorted(parts, key=lambda part: -part.work)[number - 1 :: total]


def check_share(share: Share) -> Share:
    """The same, if it is valid."""
    whole = len(share) == 2 and all(type(value) is int for value in share)
    if not whole or not 1 <= share[0] <= share[1]:
        raise InputError(
            f"part = {shown(share)}: must be two whole numbers, the part from 1 and the number of "
            "parts, for example (3, 16)"
        )
    return share


def parse_share(text: str) -> Share:
    """A part as on the command line.

    >>> parse_share("3/16")
    (3, 16)
    """
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise InputError(
            f"--part {text}: must be the part, from 1, and the number of parts, for example 3/16, "
            "or `all`"
        )
    return int(found[1]), int(found[2])


def slurm_share(environ: Mapping[str, str]) -> Share | None:
    """The part of a task of a Slurm job array; None outside of one.

    >>> sized = {"MIN": "0", "MAX": "30", "STEP": "2", "COUNT": "16"}
    >>> array = {f"SLURM_ARRAY_TASK_{key}": value for key, value in sized.items()}
    >>> slurm_share({**array, "SLURM_ARRAY_TASK_ID": "4"})
    (3, 16)
    """
    if f"{SLURM}ID" not in environ:
        return None
    try:
        task, first, last, count = (int(environ[SLURM + n]) for n in ("ID", "MIN", "MAX", "COUNT"))
        step = int(environ.get(f"{SLURM}STEP") or 1)
        number, rest = divmod(task - first, step)
        if rest or last != first + (count - 1) * step or not 0 <= number < count:
            raise ValueError
    except (KeyError, ValueError, ZeroDivisionError):
        task_id = environ[f"{SLURM}ID"]
        raise InputError(
            f"{SLURM}ID = {shown(task_id)} is not one of a range of tasks with a fixed step, whose "
            f"parts could be numbered: give the part, for example --part {task_id}/16"
        ) from None
    return number + 1, count
