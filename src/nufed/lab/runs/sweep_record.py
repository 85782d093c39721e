"""The directory of a sweep: its manifest, its runs, and their results in one table.

::

    sweep.json                 sealed: base configuration, swept keys and values, all runs in order
    runs/01-dirichlet-0.1/     an ordinary run directory for each
    results.csv                one row per run, method, group of agents and seed
    results.parquet            the same, if pyarrow is installed
    figures/, report.html      drawn from the files above
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from nufed.errors import RunError
from nufed.evaluate import summarise
from nufed.lab.config.describe import Name
from nufed.lab.config.schema import Config
from nufed.lab.config.sweep_grid import Grid, GridPoint, in_words
from nufed.lab.files import write_sealed
from nufed.lab.runs.finished_run import Run
from nufed.lab.runs.json_files import (
    Record,
    Whole,
    check_entries,
    check_format,
    checked,
    read_about,
)
from nufed.lab.runs.provenance import recorded_config
from nufed.lab.runs.read_run import load_run

FORMAT = 1
MANIFEST = "sweep.json"
Key = Annotated[str, Field(pattern=r"^\w[\w.:-]*$", max_length=400)]


class SweptRun(Record):
    """A run in ``sweep.json``."""

    name: Name
    values: dict[Key, Any]
    config: dict[str, Any]


class SweepAbout(Record):
    """``sweep.json``."""

    format: Whole
    config: dict[str, Any]
    keys: dict[Key, list[Any]]
    runs: list[SweptRun]


def write_manifest(path: Path, grid: Grid) -> None:
    """Write ``sweep.json``, which is enough to start every run."""
    about = {
        "format": FORMAT,
        "config": _plain(grid.base),
        "keys": {key: list(values) for key, values in grid.keys.items()},
        "runs": [
            {"name": p.name, "values": dict(p.values), "config": _plain(p.config)}
            for p in grid.points
        ],
    }
    write_sealed(path / MANIFEST, about)


def read_manifest(path: Path) -> Grid:
    """The grid of a sweep's directory. Imports nothing that it names."""
    if not (path / MANIFEST).is_file():
        raise RunError(
            f"{path} is not the directory of a sweep, it has no {MANIFEST}: give another, or, if "
            "the sweep was killed while it started, remove the directory and start it again"
        )
    check_entries(path)
    file = path / MANIFEST
    content = read_about(file)
    check_format(file, content.get("format", FORMAT), FORMAT)
    about = checked(SweepAbout, content, file)
    names = [run.name for run in about.runs]
    if len(set(names)) < len(names) or any(
        run.values.keys() != about.keys.keys() for run in about.runs
    ):
        raise RunError(f"{file} is invalid: its runs need distinct names and a value of every key")
    points = [
        GridPoint(run.name, run.values, recorded_config(run.config, file)) for run in about.runs
    ]
    return Grid(about.keys, recorded_config(about.config, file), points)


def run_path(path: Path, name: str) -> Path:
    """The directory of a run of a sweep."""
    return path / "runs" / name


def _plain(config: Config) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(config.model_dump_json())
    return settings


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, as :func:`nufed.sweep` and :func:`nufed.load_sweep` return them.

    Args:
        path: its directory.
        base: the configuration without the swept keys.
        keys: the swept keys with their values.
        values: the values of every run, by its name, in the order of the grid.
        runs: the runs by name, without those that can't be read.
        failures: what could not be trained or read, and why, as text.
    """

    path: Path
    base: Config
    keys: Mapping[str, Sequence[Any]]
    values: Mapping[str, Mapping[str, Any]]
    runs: Mapping[str, Run]
    failures: Sequence[str]

    def __repr__(self) -> str:
        return f"Sweep({str(self.path)!r}, {len(self.runs)} runs over {', '.join(self.keys)})"

    @classmethod
    def of(
        cls, path: Path, grid: Grid, runs: Mapping[str, Run], unread: Mapping[str, str]
    ) -> Sweep:
        """A sweep from the runs that were read, and the reasons why others were not."""
        values = {point.name: point.values for point in grid.points}
        failures = [
            f"{name} ({in_words(values[name])}): {reason}"
            for name in values
            for reason in (runs[name].failures if name in runs else [unread[name]])
        ]
        return cls(path, grid.base, grid.keys, values, runs, failures)

    def records(self) -> list[dict[str, Any]]:
        """One row per run, method (or null baseline), group of agents and seed.

        Scores are means over agents, after ``steps`` fine-tuning steps; ``as_trained`` is with the
        step size of training where another was chosen, ``global`` of the model without fine-tuning.
        """
        return [
            {"run": name, **self.values[name], **row}
            for name, run in self.runs.items()
            for row in _rows(run)
        ]

    def to_json(self) -> dict[str, Any]:
        """The results as plain data."""
        return {
            "keys": {key: list(values) for key, values in self.keys.items()},
            "failures": list(self.failures),
            "runs": [
                {
                    "name": name,
                    "directory": str(run.path),
                    "values": dict(self.values[name]),
                    **run.to_json(),
                }
                for name, run in self.runs.items()
            ],
        }


def _rows(run: Run) -> list[dict[str, Any]]:
    rows = []
    for line in run.lines():
        for group in run.groups:
            seeds = zip(line.seeds, line.scores(group), line.scores_as_trained(group), strict=True)
            for seed, final, as_trained in seeds:
                if not final:
                    continue
                after = summarise(final, line.steps, run.measure)
                trained = summarise(as_trained, line.steps, run.measure)
                rows.append(
                    {
                        "method": line.name,
                        "kind": line.kind,
                        "group": group,
                        "seed": seed,
                        "steps": line.steps,
                        "measure": run.measure.name,
                        "agents": after.agents,
                        "global": after.global_mean,
                        "personal": after.mean,
                        "as_trained": trained.mean,
                        "std": after.std,
                        "worst_tenth": after.worst_tenth,
                        "harmed": after.harmed,
                        "mean_loss": after.loss,
                    }
                )
    return rows


def load_sweep(path: str | Path, *, trust: bool = False) -> Sweep:
    """Read a finished sweep back; an unfinished run is refused.

    ``trust`` allows importing the algorithms that its runs name, if any.
    """
    path = Path(path)
    grid = read_manifest(path)
    try:
        runs = {p.name: load_run(run_path(path, p.name), trust=trust) for p in grid.points}
    except RunError as error:
        raise RunError(
            f"{error}; a stopped sweep is resumed with `nufed sweep --resume {path}`"
        ) from error
    return Sweep.of(path, grid, runs, {})
