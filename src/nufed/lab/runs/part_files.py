"""The files of one method and seed: metrics by round, checkpoints, final results.

Training resumes from a **checkpoint** to the same bits. It is one sealed file: the server's state,
the SHA-256 of the metrics written so far, an inventory of the agents' states, and digests of
configuration, data and split. The last two are kept; with ``keep = "best"`` also that of the best
round.

Early stopping and ``keep = "best"`` use **validation scores**: means over agents seen in training
on their validation samples, of the personal model after the number of fine-tuning steps that
results show. Test samples decide nothing. The decisions are functions of the recorded scores, so
that a resumed training takes the same ones.

``done.json`` marks a part as done and holds the SHA-256 of its other files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from nufed.algorithms.protocol import Algorithm, State
from nufed.errors import NumericalWarning, ResumableError, RunError
from nufed.evaluate import Evaluation
from nufed.lab.config import Config
from nufed.lab.files import (
    Pieces,
    cannot_write,
    read_sealed,
    remove_temporary,
    sha256,
    sha256_of,
    tensor_pieces,
    write_durably,
    write_sealed,
)
from nufed.lab.runs.agent_states import Inventory, StoredStates, kept_rounds, no_best
from nufed.lab.runs.directory import RunDirectory
from nufed.lab.runs.json_files import checked, finite
from nufed.lab.runs.records import (
    FITS,
    GUESSES,
    SCORES,
    STEP_SIZES,
    Done,
    Manifest,
    MetricsLine,
    WarningLine,
    round_line,
)
from nufed.objective import Objective
from nufed.server import Progress, initial_server, on_device, to_send


@dataclass
class ValidationScores:
    """The scores of the evaluated rounds so far, ascending.

    Args:
        higher_is_better: of the run's measure.
        patience: evaluations without a better score after which training stops; None: never.
        keeps_best: whether the model of the best round is kept; else the last one.

    >>> scores = ValidationScores(True, patience=2)
    >>> for round, score in [(0, 0.1), (10, 0.7), (20, 0.6), (30, 0.7)]:
    ...     scores.add(round, score)
    >>> scores.best(), scores.best(5), scores.stops_at(20), scores.stops_at(30)
    (10, 0, False, True)
    """

    higher_is_better: bool
    patience: int | None = None
    keeps_best: bool = False
    scores: list[tuple[int, float]] = field(default_factory=list)

    def restore(self, lines: Iterable[MetricsLine]) -> None:
        """Take the scores of the metrics that a training resumes from."""
        recorded = ((line.round, line.validation_score) for line in lines)
        self.scores = [(round, score) for round, score in recorded if score is not None]

    def add(self, round: int, score: float) -> None:
        """Add the score of a round, unless training resumed after it and has it already."""
        if not self.scores or self.scores[-1][0] < round:
            self.scores.append((round, score))

    def best(self, until: int | None = None) -> int | None:
        """The first round with the best score, among those until a round; None without scores.

        A score that is not finite is worse than all others.
        """
        scores = [(k, score) for k, score in self.scores if until is None or k <= until]
        return max(scores, key=lambda each: self._rank(each[1]))[0] if scores else None

    def stops_at(self, round: int) -> bool:
        """Whether training stops after this round."""
        if self.patience is None or not self.scores or self.scores[-1][0] != round:
            return False
        best = self.best()
        return sum(k > best for k, _ in self.scores if best is not None) >= self.patience

    def keeps(self, round: int) -> int | None:
        """The round whose checkpoint is kept for one of ``round``: the best until then, or None."""
        return self.best(round) if self.keeps_best else None

    def _rank(self, score: float) -> float:
        if not math.isfinite(score):
            return -math.inf
        return score if self.higher_is_better else -score


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round, and what else training resumes from."""

    about: Manifest
    server: State

    @property
    def round(self) -> int:
        """The number of rounds done."""
        return self.about.round

    def check_fits(self, server: State, folder: Path) -> None:
        """Refuse vectors whose names, shapes or dtypes differ from those of ``server``."""
        kinds = [
            {n: _kind(v, server.get(n, v)) for n, v in s.items()} for s in (self.server, server)
        ]
        if kinds[0] != kinds[1]:
            path = _path(folder, self.round)
            raise RunError(f"{path} is invalid: its vectors are not those of this method")


def _kind(vector: Tensor, initial: Tensor) -> tuple[object, ...]:
    """Dtype and shape, without the dimensions that began with length 0."""
    shape = [n for n, began in zip(vector.shape, initial.shape, strict=False) if began]
    return vector.dtype, vector.ndim, tuple(shape)


def save_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    best: Callable[[int], int | None] = no_best,
) -> None:
    """Write a checkpoint into a part's directory and remove all but those that are kept."""
    about = checkpoint.about
    path = _path(folder, about.round)
    write_sealed(path, about.model_dump(exclude_defaults=True), checkpoint.server)
    tidy(folder, about.round, best)


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
    sealed = read_sealed(path)
    about = checked(Manifest, sealed.about, path)
    if about.round != round:
        raise RunError(f"it is of round {about.round}")
    for what, value in belongs_to.items():
        if about.belongs_to.get(what) != value:
            raise RunError(f"it belongs to another {what}")
    metrics = (folder / "metrics.jsonl").read_bytes()[: about.metrics_bytes]
    if len(metrics) != about.metrics_bytes or sha256(metrics) != about.metrics_sha256:
        raise RunError("metrics.jsonl is damaged: its SHA-256 differs")
    return Checkpoint(about, sealed.tensors)


def _path(folder: Path, round: int) -> Path:
    return folder / f"checkpoint-{round:06d}.safetensors"


DONE, FAILURE = "done.json", "failure.json"
FILES = ("metrics.jsonl", "agents.jsonl", "model.safetensors")  # of a method
BASELINE_FILES = ("agents.jsonl",)
# where step sizes were chosen
CHOSEN_FILE, STEP_SIZES_FILE = "agents-chosen.jsonl", "step-sizes.json"
WARNINGS_FILE = "warnings.jsonl"  # where there were any
FITS_FILE = "fits.jsonl"  # where models are curves
GUESSES_FILE = "guesses.jsonl"  # where samples are small images
LAST_FILE = "model-last.safetensors"  # where results show the model of an earlier round
RESAMPLED_FILE = "resampled.jsonl"  # where agents are few: of the scores that results show
OPTIONAL = (
    CHOSEN_FILE,
    STEP_SIZES_FILE,
    WARNINGS_FILE,
    FITS_FILE,
    GUESSES_FILE,
    LAST_FILE,
    RESAMPLED_FILE,
)


class PartFiles:
    """The directory of a method and seed.

    Args:
        folder: its path.
        belongs_to: digests of the configuration, data and split, which a checkpoint must match.
        validation: scores for early stopping and for keeping the best round; None: neither.
        device: where vectors that are read are placed.

    ``warnings`` are the numerical problems found, each with its round; checkpoints include them.
    ``states`` are the agents' states.
    """

    def __init__(
        self,
        folder: Path,
        belongs_to: Mapping[str, str],
        validation: ValidationScores | None = None,
        device: str = "cpu",
    ) -> None:
        self.folder, self.belongs_to, self.validation = folder, belongs_to, validation
        self.device = device
        self._best = validation.keeps if validation else no_best
        self.warnings: list[WarningLine] = []
        self.states = StoredStates(folder, belongs_to, device=device)
        self._metrics: IO[bytes] | None = None
        self._hash, self._length = hashlib.sha256(), 0

    def is_done(self, rounds: int) -> bool:
        """Whether it was trained for ``rounds`` rounds; raises if its files have changed since."""
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
        """The newest checkpoint; damage is an error, even if an earlier one is intact."""
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
        about = checkpoint.about if checkpoint else None
        path, length = self.folder / "metrics.jsonl", about.metrics_bytes if about else 0
        before = path.read_bytes()[:length] if path.exists() else b""
        self._hash, self._length = hashlib.sha256(before), len(before)
        if self.validation:
            self.validation.restore(self.lines())
        kept = tidy(self.folder, about.round if about else -1, self._best)
        if about and about.round < rounds and about.round % eval_every:
            *_, last = before.splitlines() or [b""]
            if checked(MetricsLine, last, path).evaluation:
                remove_checkpoint(self.folder, about.round)
                return self.begin(rounds, eval_every)
        warned = about.notes.get("warnings", ()) if about else ()
        self.warnings = [checked(WarningLine, line, self.folder) for line in warned]
        self.states = StoredStates(
            self.folder, self.belongs_to, kept, best=self._best, device=self.device
        )
        self.states.begin(Inventory(*about.states) if about else Inventory())
        try:
            (self.folder / DONE).unlink(missing_ok=True)
            (self.folder / FAILURE).unlink(missing_ok=True)
            self._metrics = path.open("r+b" if path.exists() else "wb")
            self._metrics.truncate(length)  # later rounds are trained again
            self._metrics.seek(length)
        except OSError as error:
            raise cannot_write(path, error) from error
        return checkpoint

    def warn(self, round: int, message: str) -> None:
        """Record a numerical problem found in a round."""
        self.warnings.append(WarningLine(round=round, message=message))

    def lines(self) -> list[MetricsLine]:
        """The metrics of the rounds before the one that training starts or resumes with."""
        return self._lines(self._length)

    def all_lines(self) -> list[MetricsLine]:
        """The metrics of all rounds up to the newest valid checkpoint."""
        checkpoint, _ = load_checkpoint(self.folder, self.belongs_to)
        return self._lines(checkpoint.about.metrics_bytes if checkpoint else 0)

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
        notes = dict(notes or {})
        if self.warnings:
            notes["warnings"] = [line.model_dump() for line in self.warnings]
        about = Manifest(
            round=round,
            states=astuple(self.states.flush(round)),
            metrics_bytes=self._length,
            metrics_sha256=self._hash.hexdigest(),
            belongs_to=dict(self.belongs_to),
            notes=notes,
        )
        save_checkpoint(self.folder, Checkpoint(about, server), self._best)

    def saved(self, round: int) -> tuple[State, StoredStates]:
        """The server's and the agents' states of a round whose checkpoint is kept."""
        try:
            server = read_checkpoint(self.folder, round, self.belongs_to).server
        except (OSError, RunError) as error:
            raise ResumableError(
                f"the checkpoint of round {round} in {self.folder}, the best one, can't be used "
                f"({error})",
                "remove that directory",
            ) from error
        states = StoredStates(self.folder, self.belongs_to, [round], device=self.device)
        return on_device(server, self.device), states

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
            files[LAST_FILE] = tensor_pieces(last.server)
        if self.warnings:
            files[WARNINGS_FILE] = _lines(line.model_dump() for line in self.warnings)
        self._write_done(
            rounds,
            files,
            {"metrics.jsonl": self._hash.hexdigest()},
            trained=last.round if last.round != rounds else None,
            shown=shown.round if self.validation and self.validation.keeps_best else None,
        )

    def finish_baseline(self, rounds: int, evaluation: Evaluation) -> None:
        """Write the scores of a null baseline, then mark it as done."""
        self._write_done(rounds, _score_files(evaluation), {})

    def _write_done(
        self,
        rounds: int,
        files: Mapping[str, bytes | Pieces],
        others: Mapping[str, str],
        trained: int | None = None,
        shown: int | None = None,
    ) -> None:
        for name, content in files.items():
            write_durably(self.folder / name, content)
        hashes = {name: sha256(content) for name, content in files.items()}
        done = Done(
            rounds=rounds,
            trained=trained,
            shown=shown,
            belongs_to=dict(self.belongs_to),
            files=hashes | dict(others),
        )
        write_sealed(self.folder / DONE, done.model_dump(exclude_none=True))

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
    files = {"agents.jsonl": _lines(map(SCORES.record, evaluation.as_trained))}
    if evaluation.chosen is not None:
        files[CHOSEN_FILE] = _lines(map(SCORES.record, evaluation.chosen))
    if evaluation.step_sizes is not None:
        sizes = finite(STEP_SIZES.record(evaluation.step_sizes))
        files[STEP_SIZES_FILE] = f"{json.dumps(sizes, indent=1, allow_nan=False)}\n".encode()
    shown = evaluation.chosen or evaluation.as_trained
    if any(agent.resampled for agent in shown):
        lines = ({"agent": agent.agent, "scores": agent.resampled} for agent in shown)
        files[RESAMPLED_FILE] = _lines(lines)
    if evaluation.guesses:
        files[GUESSES_FILE] = _lines(map(GUESSES.record, evaluation.guesses))
    if evaluation.fits:
        files[FITS_FILE] = _lines(map(FITS.record, evaluation.fits))
    return files


def _lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    lines = (json.dumps(finite(record), allow_nan=False) for record in records)
    return "".join(f"{line}\n" for line in lines).encode()


def read_received(path: Path, algorithm: Algorithm, objective: Objective) -> State:
    """What the server sends, from its saved state, checked against the algorithm."""
    try:
        state = load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} can't be read as a model: {error}") from error
    for name, vector in initial_server(algorithm, objective, objective.initial()).items():
        saved = state.get(name)
        if saved is None or _kind(saved, vector) != _kind(vector, vector):
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
        raise ResumableError(
            f"{folder} is damaged ({error})", "remove that directory", ", which trains it again"
        ) from error
    return about


class Recorder:
    """Resumes one method and seed, records its rounds, and finishes it.

    Args:
        directory: the run directory.
        files: those of the method and seed.
        config: the number of rounds, and which are evaluated and have their models saved.
        method: the name of the method.
        algorithm: what the method runs.
        seed: of the training.

    A context manager that closes the files. ``notes`` are the engine's, from the checkpoint that
    training resumes from; None for a new training.
    """

    def __init__(
        self,
        directory: RunDirectory,
        files: PartFiles,
        config: Config,
        method: str,
        algorithm: Algorithm,
        seed: int,
    ) -> None:
        self.files = files
        self.notes: Mapping[str, Any] | None = None
        self._directory, self._config = directory, config
        self._method, self._algorithm, self._seed = method, algorithm, seed
        self._rounds = config.rounds_of(method)
        self._resumed: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()

    def resume(self, like: Callable[[], State], eval_every: int | None = None) -> Progress | None:
        """The training state of the newest valid checkpoint; None for a new training.

        Args:
            like: makes a server state, whose shapes and dtypes the checkpoint must match.
            eval_every: overrides the configuration's, for :meth:`PartFiles.begin`.
        """
        saved = self.files.begin(self._rounds, eval_every or self._config.eval_every)
        if saved is None:
            return None
        saved.check_fits(like(), self.files.folder)
        self.notes, self._resumed = saved.about.notes, saved.round
        medians = next((line.median_norms for line in reversed(self.files.lines())), {})
        server = on_device(saved.server, self.files.device)
        return Progress(saved.round, server, self.files.states, medians=medians)

    def is_done(self, progress: Progress) -> bool:
        """Whether a round is complete because training resumed from it.

        Not for the last round: the run may have been killed before it was finished.
        """
        return progress.round == self._resumed and not self.is_last(progress)

    def is_last(self, progress: Progress) -> bool:
        """Whether training ends after this round; known once its validation score is added."""
        scores = self.files.validation
        stops = scores is not None and scores.stops_at(progress.round)
        return progress.round == self._rounds or stops

    def shown(self, last: Progress) -> Progress:
        """The training state whose model results show, when ``last`` is the last."""
        scores = self.files.validation
        best = scores.keeps(last.round) if scores else None
        if best is None or best == last.round:
            return last
        return Progress(best, *self.files.saved(best))

    def is_kept(self, progress: Progress) -> bool:
        """Whether this is the best round so far, whose model is kept."""
        scores = self.files.validation
        return scores is not None and scores.keeps(progress.round) == progress.round

    def is_evaluated(self, progress: Progress) -> bool:
        """Whether the model after this round is evaluated."""
        return progress.round % self._config.eval_every == 0 or progress.round == self._rounds

    def record(
        self,
        progress: Progress,
        line: Mapping[str, Any],
        *,
        checkpoint: bool,
        notes: Mapping[str, Any] | None = None,
    ) -> MetricsLine | None:
        """Write a round's metrics, its model if due, and a checkpoint.

        Returns the line of metrics; None if training resumed after this round, which has one.

        Args:
            progress: the training state after the round.
            line: further entries of the line of metrics, such as scores.
            checkpoint: whether to write one.
            notes: what the engine needs to resume, as JSON.
        """
        if progress.round == self._resumed:
            return None
        whole = finite({**round_line(self._algorithm, progress), **line})
        self.files.add(whole)
        if is_due(self._config.save_every, progress.round):
            self._directory.write_model(self._method, self._seed, progress.server, progress.round)
        if checkpoint:
            self.files.checkpoint(progress.round, progress.server, notes)
        return checked(MetricsLine, whole, self.files.folder / "metrics.jsonl")

    def finish(self, evaluation: Evaluation, last: Progress, shown: Progress | None = None) -> None:
        """Write the final scores and states, then mark the part as done.

        ``shown`` is the training state whose model was evaluated, by default the ``last`` one.
        """
        self.files.finish(self._rounds, evaluation, last, shown or last)


def is_due(every: int, round: int) -> bool:
    """Whether what is scheduled every ``every`` rounds (0: never) is due after ``round``."""
    return every > 0 and round > 0 and round % every == 0
