"""Where a part of a run stands, saved so that it goes on to the very same bits.

A checkpoint is two files: the state (safetensors), and a manifest that names its SHA-256, that of
the metrics written until then, and what the state belongs to. The manifest is written last: a
checkpoint without a right one is no checkpoint. The last two are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from nufed.algorithm import State
from nufed.errors import RunError
from nufed.runs.durable import (
    cannot_write,
    read_signed,
    remove_temporary,
    sha256,
    signed,
    write_durably,
)
from nufed.runs.records import Manifest, checked
from nufed.runs.tensors import tensor_pieces

KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """The server's and the agents' state after ``round`` rounds.

    ``metrics_bytes`` is how long the file of metrics was then, ``metrics_sha256`` its SHA-256;
    ``notes`` is what else the engine must know to go on, as plain JSON.
    """

    round: int
    server: State
    clients: Mapping[int, State]
    metrics_bytes: int
    metrics_sha256: str
    notes: Mapping[str, Any] = field(default_factory=dict)

    def check_fits(self, server: State, folder: Path) -> None:
        """Refuse a state whose vectors are not like those of ``server``."""
        kinds = [{n: (v.shape, v.dtype) for n, v in s.items()} for s in (self.server, server)]
        if kinds[0] != kinds[1]:
            path = _paths(folder, self.round)[0]
            raise RunError(f"{path} does not fit: its vectors are not those of this method")


def save_checkpoint(folder: Path, checkpoint: Checkpoint, belongs_to: Mapping[str, str]) -> None:
    """Write a checkpoint into a part's directory and remove all but the last two."""
    state = tensor_pieces(_named(checkpoint))
    manifest = {
        "round": checkpoint.round,
        "state_sha256": sha256(state),
        "metrics_bytes": checkpoint.metrics_bytes,
        "metrics_sha256": checkpoint.metrics_sha256,
        "belongs_to": dict(belongs_to),
        **({"notes": dict(checkpoint.notes)} if checkpoint.notes else {}),
    }
    state_path, manifest_path = _paths(folder, checkpoint.round)
    write_durably(state_path, state)
    write_durably(manifest_path, signed(manifest))
    tidy(folder, checkpoint.round)


def load_checkpoint(
    folder: Path, belongs_to: Mapping[str, str]
) -> tuple[Checkpoint | None, list[str]]:
    """The newest good checkpoint, and what is wrong with newer ones.

    A checkpoint of another configuration, data or split is not used either.
    """
    problems: list[str] = []
    for round in reversed(_rounds(folder)):
        try:
            return _read(folder, round, belongs_to), problems
        except (OSError, ValueError, RunError, SafetensorError) as error:
            name = _paths(folder, round)[1].name
            problems.append(
                f"the checkpoint of round {round} ({name}) in {folder} can't be used: {error}"
            )
    return None, problems


def tidy(folder: Path, newest: int) -> None:
    """Remove what a kill left half done, what is newer than the newest good one, all but two."""
    remove_temporary(folder)
    rounds = _rounds(folder)
    kept = [round for round in rounds if round <= newest][-KEPT:]
    for round in rounds:
        if round not in kept:
            remove_checkpoint(folder, round)


def remove_checkpoint(folder: Path, round: int) -> None:
    """Remove one, its manifest first."""
    state, manifest = _paths(folder, round)
    try:
        manifest.unlink(missing_ok=True)
        state.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(state, error) from error


def _read(folder: Path, round: int, belongs_to: Mapping[str, str]) -> Checkpoint:
    state_path, manifest_path = _paths(folder, round)
    manifest = checked(Manifest, read_signed(manifest_path), manifest_path)
    if manifest.round != round:
        raise RunError(f"it is about round {manifest.round}")
    for what, value in belongs_to.items():
        if manifest.belongs_to.get(what) != value:
            raise RunError(f"it belongs to another {what}")
    state = state_path.read_bytes()
    if sha256(state) != manifest.state_sha256:
        raise RunError(f"{state_path.name} is damaged: its SHA-256 differs")
    length, digest = manifest.metrics_bytes, manifest.metrics_sha256
    metrics = (folder / "metrics.jsonl").read_bytes()[:length]
    if len(metrics) != length or sha256(metrics) != digest:
        raise RunError("metrics.jsonl is damaged: its SHA-256 differs")
    server: dict[str, Any] = {}
    clients: dict[int, dict[str, Any]] = {}
    for name, tensor in load(state).items():
        owner, _, vector = name.partition("/")
        own = server if owner == "server" else clients.setdefault(int(owner), {})
        own[vector] = tensor
    return Checkpoint(round, server, clients, length, digest, manifest.notes)


def _named(checkpoint: Checkpoint) -> State:
    named = {f"server/{name}": tensor for name, tensor in checkpoint.server.items()}
    for agent, state in checkpoint.clients.items():
        named |= {f"{agent}/{name}": tensor for name, tensor in state.items()}
    return named


def _paths(folder: Path, round: int) -> tuple[Path, Path]:
    stem = folder / f"checkpoint-{round:06d}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def _rounds(folder: Path) -> list[int]:
    """The rounds of which there is a state or a manifest, in order."""
    return sorted(set(_found(folder)))


def _found(folder: Path) -> Iterator[int]:
    for path in folder.glob("checkpoint-*"):
        number = path.stem.removeprefix("checkpoint-")
        if number.isdecimal():
            yield int(number)
