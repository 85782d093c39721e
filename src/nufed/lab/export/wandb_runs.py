"""A run in Weights & Biases: a W&B run per method and seed, offline unless asked otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from nufed.files import sha256
from nufed.lab.config import Config
from nufed.lab.experiment import Event, Observer
from nufed.lab.export.target import (
    Chosen,
    evaluation_scalars,
    final_scalars,
    needed,
    replay,
    round_scalars,
    settings_of_method,
    trained_parts,
)
from nufed.lab.runs import Run


class WandB(Observer):
    """Logs every method and seed as a W&B run, while it trains.

    Args:
        folder: where the directory ``wandb`` is made.
        project: the name of the project; by default that of the configuration.
        mode: ``offline`` writes files that ``wandb sync`` uploads later; ``online`` uploads now.

    A resumed run has W&B runs with the same identifiers, so that ``wandb sync`` continues their
    curves. System metrics, error reports, git and console capture are switched off.
    """

    def __init__(
        self,
        folder: str | Path = ".",
        project: str | None = None,
        mode: Literal["offline", "online"] = "offline",
    ) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # before it is imported
        with needed("Weights & Biases", "wandb"):
            import wandb
        self._wandb: Any = wandb
        self._folder, self._project, self._mode = Path(folder), project, mode
        self._runs: dict[tuple[str, int], Any] = {}

    def start(self, config: Config, path: Path) -> None:
        self._config, self._path = config, str(path.absolute())

    def round(self, event: Event) -> None:
        self._run(event.method, event.seed).log(round_scalars(event), step=event.round)

    def evaluation(self, event: Event) -> None:
        self._run(event.method, event.seed).log(evaluation_scalars(event), step=event.round)

    def end(self, run: Run | None) -> None:
        trained = list(trained_parts(run))
        for method, seed in trained:  # also those that were finished before a resume
            assert run is not None
            self._run(method, seed).summary.update(final_scalars(run, method, seed))
        for part, own in self._runs.items():
            own.finish(exit_code=0 if part in trained else 1)
        self._runs.clear()

    def _run(self, method: str, seed: int) -> Any:
        if (method, seed) not in self._runs:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._runs[method, seed] = self._wandb.init(
                project=self._project or self._config.name,
                name=f"{method} seed {seed}",
                group=Path(self._path).name,
                id=run_id(self._path, method, seed),
                resume="allow" if self._mode == "online" else None,
                config=settings_of_method(self._config, method) | {"seed": seed},
                dir=str(self._folder),
                mode=self._mode,
                reinit="create_new",  # methods may train at the same time
                settings=self._wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    symlink=False,
                    x_disable_stats=True,
                    x_disable_meta=True,
                ),
            )
        return self._runs[method, seed]


def run_id(path: str, method: str, seed: int) -> str:
    """W&B's id of a method and seed of a run; names of methods have no slash."""
    return sha256(f"{path}/{method}/{seed}".encode())[:16]


def write_wandb(run: Run, out: Path, chosen: Chosen) -> list[str]:
    """Write a finished run as offline W&B runs."""
    replay(run, WandB(out))
    return [f"W&B runs: {out / 'wandb'} (upload them with `wandb sync {out / 'wandb'}/offline-*`)"]
