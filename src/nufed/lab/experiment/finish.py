"""Writes the results, bundles and report of a run whose parts are all done."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from nufed.algorithms.protocol import Algorithm
from nufed.errors import TrainingError
from nufed.lab.bundle.from_run import NoBundleError, bundle_of, can_be_bundled
from nufed.lab.report.notebook import ShownRun, load
from nufed.lab.runs import Run, RunDirectory
from nufed.lab.runs.json_files import write_json
from nufed.objective import Objective


def finish(
    directory: RunDirectory,
    objectives: Mapping[int, Objective],
    algorithms: Mapping[str, Algorithm],
    *,
    figures: bool | None = True,
) -> ShownRun:
    """Read a run back, and write its bundles, results and report.

    Args:
        directory: the run's directory.
        objectives: the objective of every seed.
        algorithms: its methods.
        figures: whether to also write the report's charts as SVG and PNG files; None: no charts.
    """
    run = load(directory.path)
    if not run.methods:
        raise TrainingError(f"no method could be trained: {run.failures[0]}")
    _write_bundles(run, objectives, algorithms, directory.bundles())
    write_json(directory.path / "results.json", run.to_json())
    from nufed.lab.report.run_page import build_report  # charts are slow to import

    build_report([run], directory.path, figures=figures)
    return run


def _write_bundles(
    run: Run,
    objectives: Mapping[int, Objective],
    algorithms: Mapping[str, Algorithm],
    folder: Path,
) -> None:
    """Write a bundle of every method's global model, first seed, if it has one."""
    if not can_be_bundled(run):
        return
    for method, seeds in run.methods.items():
        seed = next(iter(seeds))
        with suppress(NoBundleError):  # `nufed run` reports the missing file
            bundle = bundle_of(run, method, seed, objectives[seed], algorithms[method])
            bundle.save(folder / f"{method}.nufed")
