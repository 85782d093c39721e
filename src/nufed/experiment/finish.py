"""What a run leaves when all its parts are done: results, bundles and the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nufed.algorithms import GMeta
from nufed.bundle.of_run import bundle_of, can_be_bundled
from nufed.errors import TrainingError
from nufed.objective import Objective
from nufed.runs import Run, RunDirectory, load_run
from nufed.runs.files import write_json


def finish(
    directory: RunDirectory, objectives: Mapping[int, Objective], *, figures: bool = True
) -> Run:
    """Read a run back, and write what is made from all of it.

    Args:
        directory: the run's directory.
        objectives: the objective of every seed.
        figures: whether to draw the report's charts as SVG and PNG files too.
    """
    run = load_run(directory.path)
    if not run.methods:
        raise TrainingError(f"no method could be trained: {run.failures[0]}")
    _write_bundles(run, objectives, directory.bundles())
    write_json(directory.path / "results.json", run.to_json())
    from nufed.report import build_report  # charts take a moment to import

    build_report([run], directory.path, figures=figures)
    return run


def _write_bundles(run: Run, objectives: Mapping[int, Objective], folder: Path) -> None:
    """The meta-model of every method, of its first seed, ready to be adapted by anyone."""
    for method, algorithm in run.config.algorithms().items():
        if method in run.methods and isinstance(algorithm, GMeta) and can_be_bundled(run):
            seed = next(iter(run.methods[method]))
            bundle = bundle_of(run, method, seed, objectives[seed])
            bundle.save(folder / f"{method}.nufed")
