"""The files of one method and seed: metrics, checkpoints and final results.

``done.json`` marks a part as done and holds the SHA-256 of its other files.
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

from nufed.algorithms.protocol import Algorithm, State
from nufed.errors import NumericalWarning, RunError
from nufed.evaluate import Evaluation
from nufed.files import (
    Pieces,
    cannot_write,
    read_sealed,
    sha256,
    sha256_of,
    tensor_pieces,
    write_durably,
    write_sealed,
)
from nufed.objective import Objective
from nufed.runs.agent_states import Inventory, StoredStates, no_best
from nufed.runs.checkpoint import (
    Checkpoint,
    load_checkpoint,
    read_checkpoint,
    remove_checkpoint,
    save_checkpoint,
    saved_rounds,
    tidy,
)
from nufed.runs.json_files import finite
from nufed.runs.records import Done, MetricsLine, checked
from nufed.runs.validation_scores import ValidationScores
from nufed.server import Progress, to_send

DONE, FAILURE = "done.json", "failure.json"
FILES = ("metrics.jsonl", "agents.jsonl", "model.safetensors")  # of a method
BASELINE_FILES = ("agents.jsonl",)
CHOSEN, STEP_SIZES = "agents-chosen.jsonl", "step-sizes.json"  # where step sizes were chosen
WARNINGS = "warnings.jsonl"  # where there were any
FITS = "fits.jsonl"  # where models are curves
LAST = "model-last.safetensors"  # where results show the model of an earlier round
RESAMPLED = "resampled.jsonl"  # where agents are few: of the scores that results show
OPTIONAL = (CHOSEN, STEP_SIZES, WARNINGS, FITS, LAST, RESAMPLED)


class PartFiles:
    """The directory of a method and seed.

    Args:
        folder: its path.
        belongs_to: digests of the configuration, data and split, which a checkpoint must match.
        validation: scores for early stopping and for keeping the best round; None: neither.

    ``warnings`` are the numerical problems found, each with its round; checkpoints include them.
    ``states`` are the agents' states.
    """

    def __init__(
        self,
        folder: Path,
        belongs_to: Mapping[str, str],
        validation: ValidationScores | None = None,
    ) -> None:
        self.folder, self.belongs_to, self.validation = folder, belongs_to, validation
        self._best = validation.keeps if validation else no_best
        self.warnings: list[dict[str, Any]] = []
        self.states = StoredStates(folder, belongs_to)
        self._metrics: IO[bytes] | None = None
        self._hash, self._length = hashlib.sha256(), 0

    def is_done(self, rounds: int) -> bool:
        """Whether it was trained for so many rounds; raises if its files have changed since."""
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
        """Refuse to resume to fewer rounds than are done."""
        checkpoint, _ = load_checkpoint(self.folder, self.belongs_to)
        if checkpoint and checkpoint.round > rounds:
            raise RunError(
                f"rounds = {rounds}, but {checkpoint.round} are done in {self.folder}: set rounds "
                "to that or more, or start a new run"
            )

    def newest(self) -> Checkpoint | None:
        """The last checkpoint; refused if it is damaged, whatever earlier ones are."""
        saved = saved_rounds(self.folder)
        checkpoint, problems = load_checkpoint(self.folder, self.belongs_to)
        if saved and (checkpoint is None or saved[-1] != checkpoint.round):
            raise RunError(
                f"{problems[0]}, and an earlier one does not record all privacy spent: restore "
                "its files from a backup, or start a new run"
            )
        return checkpoint

    def begin(self, rounds: int, eval_every: int) -> Checkpoint | None:
        """Truncate the metrics to the newest valid checkpoint, open them, and return it.

        If ``rounds`` has grown, the former last round may have an evaluation that ``eval_every``
        does not schedule: training then resumes from an earlier checkpoint.
        """
        checkpoint, problems = load_checkpoint(self.folder, self.belongs_to)
        for problem in problems:
            warnings.warn(f"{problem}; an earlier one is used", NumericalWarning, stacklevel=2)
        path, length = self.folder / "metrics.jsonl", checkpoint.metrics_bytes if checkpoint else 0
        before = path.read_bytes()[:length] if path.exists() else b""
        self._hash, self._length = hashlib.sha256(before), len(before)
        if self.validation:
            self.validation.restore(self.lines())
        kept = tidy(self.folder, checkpoint.round if checkpoint else -1, self._best)
        if checkpoint and checkpoint.round < rounds and checkpoint.round % eval_every:
            *_, last = before.splitlines() or [b""]
            if checked(MetricsLine, last, path).evaluation:
                remove_checkpoint(self.folder, checkpoint.round)
                return self.begin(rounds, eval_every)
        self.warnings = list(checkpoint.notes.get("warnings", ())) if checkpoint else []
        self.states = StoredStates(self.folder, self.belongs_to, kept, best=self._best)
        self.states.begin(checkpoint.states if checkpoint else Inventory())
        try:
            (self.folder / DONE).unlink(missing_ok=True)
            (self.folder / FAILURE).unlink(missing_ok=True)
            self._metrics = path.open("r+b" if path.exists() else "wb")
            self._metrics.truncate(length)  # later rounds are trained again
            self._metrics.seek(length)
        except OSError as error:
            raise cannot_write(path, error) from error
        return checkpoint

    def lines(self) -> list[MetricsLine]:
        """The metrics of the rounds before the one that training starts or resumes with."""
        return self._lines(self._length)

    def all_lines(self) -> list[MetricsLine]:
        """The metrics of all rounds up to the newest valid checkpoint."""
        checkpoint, _ = load_checkpoint(self.folder, self.belongs_to)
        return self._lines(checkpoint.metrics_bytes if checkpoint else 0)

    def _lines(self, length: int) -> list[MetricsLine]:
        path = self.folder / "metrics.jsonl"
        text = path.read_bytes()[:length] if length else b""
        return [checked(MetricsLine, line, path) for line in text.splitlines()]

    def add(self, record: Mapping[str, Any]) -> None:
        """Write one line of metrics."""
        assert self._metrics is not None
        line = (json.dumps(finite(record), allow_nan=False) + "\n").encode()
        try:
            self._metrics.write(line)
            self._metrics.flush()  # for `nufed watch`
        except OSError as error:
            raise cannot_write(self.folder / "metrics.jsonl", error) from error
        self._hash.update(line)
        self._length += len(line)

    def checkpoint(self, round: int, server: State, notes: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint."""
        self._sync()
        states = self.states.flush(round)
        notes = {**(notes or {}), **({"warnings": self.warnings} if self.warnings else {})}
        save_checkpoint(
            self.folder,
            Checkpoint(round, server, self._length, self._hash.hexdigest(), notes, states),
            self.belongs_to,
            self._best,
        )

    def saved(self, round: int) -> tuple[State, StoredStates]:
        """The server's and the agents' states of a round whose checkpoint is kept."""
        try:
            server = read_checkpoint(self.folder, round, self.belongs_to).server
        except (OSError, RunError) as error:
            raise RunError(
                f"the checkpoint of round {round} in {self.folder}, the best one, can't be used "
                f"({error}): remove that directory and continue with `nufed run --resume`"
            ) from error
        return server, StoredStates(self.folder, self.belongs_to, [round])

    def finish(self, rounds: int, evaluation: Evaluation, last: Progress, shown: Progress) -> None:
        """Write the final scores and states, then mark the part as done.

        Args:
            rounds: those of the configuration; ``last`` is after fewer if training stopped early.
            evaluation: the final scores, of the model that results show.
            last: the training state at the end.
            shown: that of the model that results show.
        """
        self._sync()
        self.states.prune()
        files: dict[str, bytes | Pieces] = {
            **_score_files(evaluation),
            "model.safetensors": tensor_pieces(shown.server),
        }
        if shown.round != last.round:
            files[LAST] = tensor_pieces(last.server)
        if self.warnings:
            files[WARNINGS] = _lines(self.warnings)
        about = {"trained": last.round} if last.round != rounds else {}
        if self.validation and self.validation.keeps_best:
            about["shown"] = shown.round
        self._write_done(rounds, files, {"metrics.jsonl": self._hash.hexdigest()}, about)

    def finish_baseline(self, rounds: int, evaluation: Evaluation) -> None:
        """Write the scores of a null baseline, then mark it as done."""
        self._write_done(rounds, _score_files(evaluation), {})

    def _write_done(
        self,
        rounds: int,
        files: Mapping[str, bytes | Pieces],
        others: Mapping[str, str],
        further: Mapping[str, int] | None = None,
    ) -> None:
        for name, content in files.items():
            write_durably(self.folder / name, content)
        hashes = {name: sha256(content) for name, content in files.items()}
        about = {
            "rounds": rounds,
            **(further or {}),
            "belongs_to": dict(self.belongs_to),
            "files": {**hashes, **others},
        }
        write_sealed(self.folder / DONE, about)

    def close(self) -> None:
        """Close the metrics; lines since the last sync may be lost."""
        if self._metrics is not None:
            with suppress(OSError):  # a full disk, which the last sync would have reported
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
    shown = evaluation.chosen or evaluation.as_trained
    if any(agent.resampled for agent in shown):
        own = ({"agent": agent.agent, "scores": agent.resampled} for agent in shown)
        files[RESAMPLED] = _lines(own)
    if evaluation.fits:
        files[FITS] = _lines(fit.record() for fit in evaluation.fits)
    return files


def _lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    lines = (json.dumps(finite(record), allow_nan=False) for record in records)
    return "".join(f"{line}\n" for line in lines).encode()


def read_received(path: Path, algorithm: Algorithm, objective: Objective) -> State:
    """The broadcast vectors of a saved server state, checked against the algorithm."""
    try:
        state = load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} can't be read as a model: {error}") from error
    for name, vector in algorithm.initial_server(objective, objective.initial()).items():
        found = state.get(name)
        if found is None or found.shape != vector.shape or found.dtype != vector.dtype:
            raise RunError(
                f"{path} is invalid: it must hold a vector {name!r} of {vector.numel()} numbers, "
                f"{vector.dtype}"
            )
    return to_send(algorithm, state)


def check_done(folder: Path) -> Done:
    """The content of ``done.json``; raises if a file that it lists has changed since."""
    try:
        about = checked(Done, read_sealed(folder / DONE).about, folder / DONE)
        for name, digest in about.files.items():
            if name not in (*FILES, *OPTIONAL):
                raise RunError(f"{DONE} lists {name!r}, which is not a file of a part")
            if sha256_of(folder / name) != digest:
                raise RunError(f"{name}: its SHA-256 differs from that in {DONE}")
    except (OSError, RunError) as error:
        raise RunError(
            f"{folder} is damaged ({error}): remove that directory and continue with `nufed run "
            "--resume`, which trains it again"
        ) from error
    return about
