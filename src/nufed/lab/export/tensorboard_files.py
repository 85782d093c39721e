"""TensorBoard event files of a run, one directory per method and seed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nufed.lab.config import Config
from nufed.lab.experiment import Event
from nufed.lab.export.target import Chosen, Tracker, needed, replay
from nufed.lab.runs import Run

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Writes event files that ``tensorboard --logdir RUN/tensorboard`` shows while a run trains.

    Args:
        folder: where to write; by default ``tensorboard`` in the run directory.

    On resume, TensorBoard discards the rounds that are trained again, and the curves continue.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        with needed("TensorBoard", "tensorboard"):
            import tensorboardX  # type: ignore[import-untyped]
        self._make_writer: Any = tensorboardX.SummaryWriter
        self._folder = None if folder is None else Path(folder)
        self._writers: dict[tuple[str, int], Any] = {}
        self._resumed: dict[tuple[str, int], Event] = {}

    def start(self, config: Config, path: Path) -> None:
        super().start(config, path)
        self._folder = self._folder or path / FOLDER

    def part(self, event: Event) -> None:
        self._resumed[event.method, event.seed] = event

    def evaluation(self, event: Event) -> None:
        super().evaluation(event)
        self._writer(event.method, event.seed).flush()

    def _close(self, trained: Collection[tuple[str, int]] | None) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _log(self, method: str, seed: int, scalars: Mapping[str, float], round: int) -> None:
        for name, value in scalars.items():
            self._writer(method, seed).add_scalar(name, value, round)

    def _writer(self, method: str, seed: int) -> Any:
        """The writer of a method and seed, opened when it has something to write."""
        if (method, seed) not in self._writers:
            assert self._folder is not None
            after = self._resumed[method, seed]
            started = after.round or after.scored_round is not None
            first = after.round + 1 if started else 0  # later rounds are logged again
            self._writers[method, seed] = self._make_writer(
                str(self._folder / method / f"seed-{seed}"),
                purge_step=first,
                filename_suffix=f".{first:06d}",  # another file than one of the same second
            )
        return self._writers[method, seed]


def write_tensorboard(run: Run, out: Path, chosen: Chosen) -> list[str]:
    """Write the event files of a finished run."""
    replay(run, TensorBoard(out))
    return [f"event files: {out} (show them with `tensorboard --logdir {out}`)"]
