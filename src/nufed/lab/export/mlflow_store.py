"""A run in MLflow's tracking store: an MLflow run per method and seed."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nufed.lab.config import Config
from nufed.lab.export.target import Chosen, Tracker, needed, replay, settings_of_method
from nufed.lab.runs import Run

FOLDER = "mlruns"
MAX_TEXT = 500  # characters of a parameter that every store of MLflow takes


class MLflow(Tracker):
    """Logs every method and seed as an MLflow run, while it trains.

    Args:
        store: a directory on this machine, or a tracking URI (``sqlite:///mlflow.db``,
            ``http://…``). Only an URI of a server opens a connection.
        experiment: the name of the experiment; by default that of the configuration.

    A resumed run continues its MLflow runs, which it finds by their tags. MLflow's telemetry is
    switched off for this process.
    """

    def __init__(self, store: str | Path = FOLDER, experiment: str | None = None) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before it is imported
        uri = str(store)
        if "://" not in uri:  # MLflow prefers databases, which need further packages
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = Path(store).absolute().as_uri()
        with needed("MLflow", "mlflow"):
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        self._metric, self._param = Metric, Param
        self._client = MlflowClient(tracking_uri=uri)
        self._experiment = experiment
        self._runs: dict[tuple[str, int], str] = {}
        self._last: dict[tuple[str, str], int] = {}  # the last round of a run's metric

    def start(self, config: Config, path: Path) -> None:
        super().start(config, path)
        name = self._experiment or config.name
        known = self._client.get_experiment_by_name(name)
        self._in = known.experiment_id if known else self._client.create_experiment(name)

    def _close(self, trained: Collection[tuple[str, int]] | None) -> None:
        for part, identity in self._runs.items():
            state = "KILLED" if trained is None else "FINISHED" if part in trained else "FAILED"
            self._client.set_terminated(identity, state)
        self._runs.clear()

    def _log(self, method: str, seed: int, scalars: Mapping[str, float], round: int) -> None:
        """Log what is new: after a resume, some rounds are logged again, with the same values."""
        identity, now = self._run(method, seed), int(1000 * time.time())
        new = [name for name in scalars if round > self._last_round(identity, name)]
        metrics = [self._metric(name, scalars[name], now, round) for name in new]
        self._client.log_batch(identity, metrics=metrics)
        self._last |= {(identity, name): round for name in new}

    def _last_round(self, identity: str, name: str) -> int:
        if (identity, name) not in self._last:
            history = self._client.get_metric_history(identity, name)
            self._last[identity, name] = max((metric.step for metric in history), default=-1)
        return self._last[identity, name]

    def _run(self, method: str, seed: int) -> str:
        """The MLflow run of a method and seed: one from before a resume, or a new one."""
        if (method, seed) in self._runs:
            return self._runs[method, seed]
        tags = {"nufed.run": str(self._path), "nufed.method": method, "nufed.seed": str(seed)}
        known: list[Any] = [
            stored
            for stored in self._client.search_runs(
                [self._in], f"tags.nufed.method = '{method}' and tags.nufed.seed = '{seed}'"
            )
            if stored.data.tags.get("nufed.run") == str(self._path)
        ]
        if known:
            identity = str(known[0].info.run_id)
            self._client.update_run(identity, status="RUNNING")
        else:
            made = self._client.create_run(self._in, tags=tags, run_name=f"{method} seed {seed}")
            identity = str(made.info.run_id)
            settings = settings_of_method(self._config, method)
            params = [self._param(name, text[:MAX_TEXT]) for name, text in settings.items()]
            self._client.log_batch(identity, params=params[:100])
        self._runs[method, seed] = identity
        return identity


def write_mlflow(run: Run, out: Path, chosen: Chosen) -> list[str]:
    """Write a finished run to a store in a directory."""
    replay(run, MLflow(out))
    show = f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {out}"
    return [f"MLflow runs: {out} (show them with `{show}`)"]
