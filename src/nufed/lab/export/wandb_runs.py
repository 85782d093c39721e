"""A run in Weights & Biases: a W&B run per method and seed, offline unless asked otherwise."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from nufed.lab.export.target import Chosen, Tracker, needed, replay, settings_of_method
from nufed.lab.files import sha256
from nufed.lab.runs import Run


class WandB(Tracker):
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

    def _log(self, method: str, seed: int, scalars: Mapping[str, float], round: int) -> None:
        self._run(method, seed).log(scalars, step=round)

    def _log_final(self, method: str, seed: int, scalars: Mapping[str, float], round: int) -> None:
        self._run(method, seed).summary.update(scalars)

    def _close(self, trained: Collection[tuple[str, int]] | None) -> None:
        for part, opened in self._runs.items():
            opened.finish(exit_code=0 if part in (trained or ()) else 1)
        self._runs.clear()

    def _run(self, method: str, seed: int) -> Any:
        if (method, seed) not in self._runs:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._runs[method, seed] = self._wandb.init(
                project=self._project or self._config.name,
                name=f"{method} seed {seed}",
                group=self._path.name,
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


def run_id(path: Path, method: str, seed: int) -> str:
    """W&B's id of a method and seed of a run; names of methods have no slash."""
    return sha256(f"{path}/{method}/{seed}".encode())[:16]


def write_wandb(run: Run, out: Path, chosen: Chosen) -> list[str]:
    """Write a finished run as offline W&B runs."""
    replay(run, WandB(out))
    return [f"W&B runs: {out / 'wandb'} (upload them with `wandb sync {out / 'wandb'}/offline-*`)"]
