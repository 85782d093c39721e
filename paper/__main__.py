"""Runs the stages of `make paper`, one after another, and writes docs/results.md.

    python -m paper              all stages that are not done yet, then the page
    python -m paper fig1 fig2    only these, then the page
    python -m paper --page       only the page

A stage whose summary (docs/results/NAME.json) exists is skipped, an interrupted one is resumed. To
repeat one, remove its summary and its run directory.
"""

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from nufed import NumericalWarning, resume, run
from nufed.errors import NufedError
from nufed.lab.cli.progress import show_progress
from nufed.lab.runs import Run, load_run
from paper import page, tuning
from paper.stages import FOUR, STAGES, WHERE
from paper.summary import summarise_run, summarise_search


def main(arguments: list[str]) -> None:
    unknown = [a for a in arguments if a not in STAGES and a != "--page"]
    if unknown:
        sys.exit(f"{unknown[0]!r} is not a stage: use one of {', '.join(STAGES)}")
    wanted = [a for a in arguments if a in STAGES] or list(STAGES)
    if "--page" not in arguments:
        for name in wanted:
            do_stage(name)
    print(page.write())


def do_stage(name: str) -> None:
    """Run a stage unless it is done, and write its summary."""
    path = WHERE.results / f"{name}.json"
    if path.exists():
        return
    print(f"{name}: {STAGES[name].about}")
    WHERE.results.mkdir(parents=True, exist_ok=True)
    found = _search(name) if STAGES[name].search else _single(name)
    path.write_text(json.dumps(found, separators=(",", ":")) + "\n", "utf-8")
    print(f"{name}: {found['seconds'] / 60:.1f} min")


def _single(name: str) -> dict[str, Any]:
    directory = WHERE.runs / name
    run = _train(STAGES[name].config(), directory)
    return summarise_run(name, run, _seconds(directory))


def _search(name: str) -> dict[str, Any]:
    """Train around the best step sizes so far until none lies on an edge of the grid."""
    scores: tuning.Scores = {method: {} for method in FOUR}
    seconds, runs = 0.0, 0
    while runs < tuning.MAX_RUNS:
        points = {method: tuning.next_points(method, own) for method, own in scores.items()}
        if not any(points.values()):
            break
        runs += 1
        directory = WHERE.runs / f"{name}-{runs}"
        run = _train(tuning.tables_of(STAGES[name].config(), points), directory)
        tuning.read_scores(run, scores)
        seconds += _seconds(directory)
    return summarise_search(name, run, scores, seconds)


def _train(tables: dict[str, Any], directory: Path) -> Run:
    """The run of a directory: trained, resumed, or read if it is finished."""
    if (directory / "results.json").exists():
        return load_run(directory)
    before, start = _seconds(directory), time.monotonic()
    with show_progress(Console(stderr=True)) as display, warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # expected for the large steps of `delta`
        how = {"observers": [display], "figures": False}
        try:
            if (directory / "run.json").exists():
                return resume(directory, trust=True, **how)  # started by this command
            return run(_without_none(WHERE.shrink(tables)), out=directory, **how)
        finally:
            if directory.exists():
                seconds = before + time.monotonic() - start
                (directory / "stage.json").write_text(json.dumps({"seconds": seconds}))


def _seconds(directory: Path) -> float:
    path = directory / "stage.json"
    return json.loads(path.read_text("utf-8"))["seconds"] if path.exists() else 0.0


def _without_none(tables: dict) -> dict:
    """TOML has no null: keys set to None are omitted."""
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in tables.items()
        if value is not None
    }


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except NufedError as error:
        sys.exit(f"paper: {error}")
    except KeyboardInterrupt:
        sys.exit("paper: stopped; the same command resumes the stage that was running")
