"""Checkpoints of one part of a run, from which it resumes to the same bits.

A checkpoint is one sealed file: the server's state, the SHA-256 of the metrics written so far, an
inventory of the agents' states, and digests of configuration, data and split. The last two are
kept; with ``keep = "best"`` also that of the best round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from nufed.algorithms.protocol import State
from nufed.errors import RunError
from nufed.files import cannot_write, read_sealed, remove_temporary, sha256, write_sealed
from nufed.runs.agent_states import Inventory, kept_rounds, no_best
from nufed.runs.records import Manifest, checked


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after ``round`` rounds.

    ``metrics_bytes`` is the length of the metrics file then, ``metrics_sha256`` its SHA-256;
    ``notes`` is what else the engine needs to resume, as plain JSON; ``states`` is an inventory
    of the agents' states, which are in files of their own.
    """

    round: int
    server: State
    metrics_bytes: int
    metrics_sha256: str
    notes: Mapping[str, Any] = field(default_factory=dict)
    states: Inventory = field(default_factory=Inventory)

    def check_fits(self, server: State, folder: Path) -> None:
        """Refuse vectors whose names, shapes or dtypes differ from those of ``server``."""
        kinds = [{n: (v.shape, v.dtype) for n, v in s.items()} for s in (self.server, server)]
        if kinds[0] != kinds[1]:
            path = _path(folder, self.round)
            raise RunError(f"{path} is invalid: its vectors are not those of this method")


def save_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    belongs_to: Mapping[str, str],
    best: Callable[[int], int | None] = no_best,
) -> None:
    """Write a checkpoint into a part's directory and remove all but those that are kept."""
    manifest = {
        "round": checkpoint.round,
        "states": astuple(checkpoint.states),
        "metrics_bytes": checkpoint.metrics_bytes,
        "metrics_sha256": checkpoint.metrics_sha256,
        "belongs_to": dict(belongs_to),
        **({"notes": dict(checkpoint.notes)} if checkpoint.notes else {}),
    }
    write_sealed(_path(folder, checkpoint.round), manifest, checkpoint.server)
    tidy(folder, checkpoint.round, best)


def load_checkpoint(
    folder: Path, belongs_to: Mapping[str, str]
) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint, and why newer ones are not.

    A checkpoint of another configuration, data or split is not valid.
    """
    problems: list[str] = []
    for round in reversed(saved_rounds(folder)):
        try:
            return read_checkpoint(folder, round, belongs_to), problems
        except (OSError, RunError) as error:
            name = _path(folder, round).name
            problems.append(
                f"the checkpoint of round {round} ({name}) in {folder} can't be used: {error}"
            )
    return None, problems


def tidy(folder: Path, newest: int, best: Callable[[int], int | None] = no_best) -> list[int]:
    """Remove temporary files, checkpoints newer than ``newest``, and all but the last two others.

    ``best`` of a round that is kept is kept, too. Returns the rounds of those that are kept.
    """
    remove_temporary(folder)
    rounds = saved_rounds(folder)
    kept = kept_rounds([round for round in rounds if round <= newest], best)
    for round in rounds:
        if round not in kept:
            remove_checkpoint(folder, round)
    return kept


def remove_checkpoint(folder: Path, round: int) -> None:
    path = _path(folder, round)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def saved_rounds(folder: Path) -> list[int]:
    """The rounds of which there is a checkpoint, valid or not, ascending."""
    stems = (path.stem for path in folder.glob("checkpoint-*.safetensors"))
    numbers = [stem.removeprefix("checkpoint-") for stem in stems]
    return sorted(int(number) for number in numbers if number.isdecimal())


def read_checkpoint(folder: Path, round: int, belongs_to: Mapping[str, str]) -> Checkpoint:
    """The checkpoint of a round; raises if it is damaged or of another run."""
    path = _path(folder, round)
    found = read_sealed(path)
    manifest = checked(Manifest, found.about, path)
    if manifest.round != round:
        raise RunError(f"it is of round {manifest.round}")
    for what, value in belongs_to.items():
        if manifest.belongs_to.get(what) != value:
            raise RunError(f"it belongs to another {what}")
    length, digest = manifest.metrics_bytes, manifest.metrics_sha256
    metrics = (folder / "metrics.jsonl").read_bytes()[:length]
    if len(metrics) != length or sha256(metrics) != digest:
        raise RunError("metrics.jsonl is damaged: its SHA-256 differs")
    states = Inventory(*manifest.states)
    return Checkpoint(round, found.tensors, length, digest, manifest.notes, states)


def _path(folder: Path, round: int) -> Path:
    return folder / f"checkpoint-{round:06d}.safetensors"
