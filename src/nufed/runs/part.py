"""The files of one method and seed: metrics as they come, checkpoints, and what stays at the end.

A part is done when ``done.json`` says so, with the SHA-256 of its other files.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load

from nufed.algorithm import State
from nufed.errors import NumericalWarning, RunError
from nufed.evaluate import Evaluation
from nufed.runs.checkpoint import (
    Checkpoint,
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
    tidy,
)
from nufed.runs.durable import (
    Pieces,
    cannot_write,
    read_signed,
    sha256,
    sha256_of,
    signed,
    write_durably,
)
from nufed.runs.files import finite
from nufed.runs.records import Done, MetricsLine, checked
from nufed.runs.tensors import tensor_pieces

DONE = "done.json"
FILES = ("metrics.jsonl", "agents.jsonl", "model.safetensors")  # of a method
BASELINE_FILES = ("agents.jsonl",)
CHOSEN, STEP_SIZES = "agents-chosen.jsonl", "step-sizes.json"  # where step sizes were chosen
WARNINGS = "warnings.jsonl"  # where there were any
OPTIONAL = (CHOSEN, STEP_SIZES, WARNINGS)


class PartFiles:
    """The directory of a method and seed.

    Args:
        folder: where it is.
        belongs_to: hashes of the configuration, data and split, which a checkpoint must share.

    ``warnings`` is what is wrong with the numbers of the part, each with its round; checkpoints
    carry it.
    """

    def __init__(self, folder: Path, belongs_to: Mapping[str, str]) -> None:
        self.folder, self.belongs_to = folder, belongs_to
        self.warnings: list[dict[str, Any]] = []
        self._metrics: IO[bytes] | None = None
        self._hash, self._length = hashlib.sha256(), 0

    def is_done(self, rounds: int) -> bool:
        """Whether it was trained for so many rounds, and all its files are as they were then."""
        if not (self.folder / DONE).exists():
            return False
        about = check_done(self.folder)
        if about.rounds > rounds:
            raise RunError(
                f"rounds = {rounds}, but {about.rounds} are done in {self.folder}: set rounds to "
                "that or more, or start a new run"
            )
        return about.rounds == rounds and about.belongs_to == dict(self.belongs_to)

    def check_rounds(self, rounds: int) -> None:
        """Refuse to go on to fewer rounds than are done."""
        checkpoint, _ = load_checkpoint(self.folder, self.belongs_to)
        if checkpoint and checkpoint.round > rounds:
            raise RunError(
                f"rounds = {rounds}, but {checkpoint.round} are done in {self.folder}: set rounds "
                "to that or more, or start a new run"
            )

    def check_newest(self) -> None:
        """Refuse to go on from a checkpoint before the last one, which is damaged."""
        saved = [path.stem for path in self.folder.glob("checkpoint-*.json")]
        checkpoint, problems = load_checkpoint(self.folder, self.belongs_to)
        used = f"checkpoint-{checkpoint.round:06d}" if checkpoint else ""
        if saved and max(saved) != used:
            raise RunError(
                f"{problems[0]}, and an earlier one does not know what privacy it cost: put back "
                "a copy of its files, or start a new run"
            )

    def begin(self, rounds: int, eval_every: int) -> Checkpoint | None:
        """Open the metrics where the newest good checkpoint left them, and return it.

        A part that now goes on for more rounds was evaluated after its last round: if that was not
        its turn, training goes on from an earlier checkpoint.
        """
        checkpoint, problems = load_checkpoint(self.folder, self.belongs_to)
        for problem in problems:
            warnings.warn(f"{problem}; an earlier one is used", NumericalWarning, stacklevel=2)
        tidy(self.folder, checkpoint.round if checkpoint else -1)
        path, length = self.folder / "metrics.jsonl", checkpoint.metrics_bytes if checkpoint else 0
        if checkpoint and checkpoint.round < rounds and checkpoint.round % eval_every:
            *_, last = path.read_bytes()[:length].splitlines() or [b""]
            if checked(MetricsLine, last, path).evaluation:
                remove_checkpoint(self.folder, checkpoint.round)
                return self.begin(rounds, eval_every)
        self.warnings = list(checkpoint.notes.get("warnings", ())) if checkpoint else []
        kept = path.read_bytes()[:length] if path.exists() else b""
        self._hash, self._length = hashlib.sha256(kept), len(kept)
        try:
            (self.folder / DONE).unlink(missing_ok=True)
            (self.folder / "failure.json").unlink(missing_ok=True)
            self._metrics = path.open("r+b" if path.exists() else "wb")
            self._metrics.truncate(length)  # what came after the checkpoint is made again
            self._metrics.seek(length)
        except OSError as error:
            raise cannot_write(path, error) from error
        return checkpoint

    def add(self, record: Mapping[str, Any]) -> None:
        """Write one line of metrics."""
        assert self._metrics is not None
        line = (json.dumps(finite(record), allow_nan=False) + "\n").encode()
        try:
            self._metrics.write(line)
        except OSError as error:
            raise cannot_write(self.folder / "metrics.jsonl", error) from error
        self._hash.update(line)
        self._length += len(line)

    def checkpoint(
        self,
        round: int,
        server: State,
        clients: Mapping[int, State],
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Save where training stands."""
        self._sync()
        notes = {**(notes or {}), **({"warnings": self.warnings} if self.warnings else {})}
        save_checkpoint(
            self.folder,
            Checkpoint(round, server, clients, self._length, self._hash.hexdigest(), notes),
            self.belongs_to,
        )

    def finish(self, rounds: int, evaluation: Evaluation, server: State) -> None:
        """Write the final scores and state, and that all is done."""
        self._sync()
        files: dict[str, bytes | Pieces] = {
            **_score_files(evaluation),
            "model.safetensors": tensor_pieces(server),
        }
        if self.warnings:
            files[WARNINGS] = _lines(self.warnings)
        self._write_done(rounds, files, {"metrics.jsonl": self._hash.hexdigest()})

    def finish_baseline(self, rounds: int, evaluation: Evaluation) -> None:
        """Write the scores of a null baseline, and that it is done."""
        self._write_done(rounds, _score_files(evaluation), {})

    def _write_done(
        self, rounds: int, files: Mapping[str, bytes | Pieces], others: Mapping[str, str]
    ) -> None:
        for name, content in files.items():
            write_durably(self.folder / name, content)
        hashes = {name: sha256(content) for name, content in files.items()}
        about = {
            "rounds": rounds,
            "belongs_to": dict(self.belongs_to),
            "files": {**hashes, **others},
        }
        write_durably(self.folder / DONE, signed(about))

    def close(self) -> None:
        """Close the metrics; what is not synced yet need not be there."""
        if self._metrics is not None:
            with suppress(OSError):  # of a full disk, which was told when it mattered
                self._metrics.close()
            self._metrics = None

    def _sync(self) -> None:
        assert self._metrics is not None
        try:
            self._metrics.flush()
            os.fsync(self._metrics.fileno())
        except OSError as error:
            raise cannot_write(self.folder / "metrics.jsonl", error) from error


def _score_files(evaluation: Evaluation) -> dict[str, bytes]:
    files = {"agents.jsonl": _lines(agent.record() for agent in evaluation.as_trained)}
    if evaluation.chosen is not None:
        files[CHOSEN] = _lines(agent.record() for agent in evaluation.chosen)
    if evaluation.step_sizes is not None:
        text = json.dumps(finite(evaluation.step_sizes.record()), indent=1, allow_nan=False)
        files[STEP_SIZES] = f"{text}\n".encode()
    return files


def _lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    lines = (json.dumps(finite(record), allow_nan=False) for record in records)
    return "".join(f"{line}\n" for line in lines).encode()


def read_server(path: Path, size: int) -> State:
    """A saved state of the server, whose model must be a vector of ``size`` numbers."""
    try:
        state = load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} can't be read as a model: {error}") from error
    model = state.get("model")
    if model is None or model.shape != (size,) or not model.is_floating_point():
        raise RunError(f"{path} does not fit: it must hold a vector 'model' of {size} numbers")
    return state


def check_done(folder: Path) -> Done:
    """What a part's end says; a file that has changed since is named."""
    try:
        about = checked(Done, read_signed(folder / DONE), folder / DONE)
        for name, digest in about.files.items():
            if name not in (*FILES, *OPTIONAL):
                raise RunError(f"it names {name!r}, which is no file of a part")
            if sha256_of(folder / name) != digest:
                raise RunError(f"{name}: its SHA-256 differs from that in {DONE}")
    except (OSError, RunError) as error:
        raise RunError(
            f"{folder} is damaged ({error}): remove that directory and continue with "
            "`nufed run --resume`, which trains it again"
        ) from error
    return about
