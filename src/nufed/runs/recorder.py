"""Records the rounds of one method and seed in its run directory, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from nufed.algorithms.protocol import Algorithm, State
from nufed.config import Config
from nufed.evaluate import Evaluation
from nufed.runs.directory import RunDirectory
from nufed.runs.json_files import finite
from nufed.runs.metric_lines import round_line
from nufed.runs.part_files import PartFiles
from nufed.runs.records import MetricsLine, checked
from nufed.server import Progress


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
        saved = self.files.begin(self._config.rounds, eval_every or self._config.eval_every)
        if saved is None:
            return None
        saved.check_fits(like(), self.files.folder)
        self.notes, self._resumed = saved.notes, saved.round
        medians = next((line.median_norms for line in reversed(self.files.lines())), {})
        return Progress(saved.round, saved.server, self.files.states, medians=medians)

    def is_done(self, progress: Progress) -> bool:
        """Whether a round is complete because training resumed from it.

        Not for the last round: the run may have been killed before it was finished.
        """
        return progress.round == self._resumed and not self.is_last(progress)

    def is_last(self, progress: Progress) -> bool:
        """Whether training ends after this round; known once its validation score is added."""
        scores = self.files.validation
        stops = scores is not None and scores.stops_at(progress.round)
        return progress.round == self._config.rounds or stops

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
        return progress.round % self._config.eval_every == 0 or (
            progress.round == self._config.rounds
        )

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
        self.files.finish(self._config.rounds, evaluation, last, shown or last)


def is_due(every: int, round: int) -> bool:
    """Whether something scheduled every so many rounds (0: never) is due after this one."""
    return every > 0 and round > 0 and round % every == 0
