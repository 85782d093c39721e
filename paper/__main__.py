"""Runs the stages of `make paper`, one after another, and writes docs/results.md.

    python -m paper              all stages that are not done yet, then the page
    python -m paper fig1 fig2    only these, then the page
    python -m paper --page       only the page

A stage that is done is not run again, one that was stopped goes on. To run one again, remove its
run directory.
"""

import json
import sys
import time
import warnings
from pathlib import Path

from rich.console import Console

from nufed import NumericalWarning, resume, run
from nufed.errors import NufedError
from nufed.progress import show_progress
from nufed.runs import load_run
from paper import page
from paper.stages import RESULTS, RUNS, STAGES
from paper.summary import summarise_run


def main(arguments: list[str]) -> None:
    unknown = [a for a in arguments if a not in STAGES and a != "--page"]
    if unknown:
        sys.exit(f"{unknown[0]!r} is no stage; there are {', '.join(STAGES)}")
    wanted = [a for a in arguments if a in STAGES] or list(STAGES)
    if "--page" not in arguments:
        for name in wanted:
            do_stage(name)
    print(page.write())


def do_stage(name: str) -> None:
    """Run a stage unless it is done, and write its summary."""
    directory, summary = RUNS / name, RESULTS / f"{name}.json"
    if not (directory / "results.json").exists():
        print(f"{name}: {STAGES[name].about}")
        _train(name, directory)
        print(f"{name}: {_seconds(directory) / 60:.1f} min")
        summary.unlink(missing_ok=True)
    if not summary.exists():
        RESULTS.mkdir(parents=True, exist_ok=True)
        text = json.dumps(summarise_run(name, load_run(directory)), separators=(",", ":"))
        summary.write_text(text + "\n", "utf-8")


def _train(name: str, directory: Path) -> None:
    """Begin a stage, or go on with one that was stopped, and note how long it took."""
    before, start = _seconds(directory), time.monotonic()
    with show_progress(Console(stderr=True)) as display, warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # about the poor steps of `delta`
        follow = {"on_start": display.start, "on_progress": display.update}
        try:
            if (directory / "run.json").exists():
                resume(directory, **follow)
            else:
                run(_without_nothing(STAGES[name].config()), out=directory, **follow)
        finally:
            if directory.exists():
                seconds = before + time.monotonic() - start
                (directory / "stage.json").write_text(json.dumps({"seconds": seconds}))


def _seconds(directory: Path) -> float:
    path = directory / "stage.json"
    return json.loads(path.read_text("utf-8"))["seconds"] if path.exists() else 0.0


def _without_nothing(tables: dict) -> dict:
    """TOML has no null: a key set to None is left out."""
    return {
        key: _without_nothing(value) if isinstance(value, dict) else value
        for key, value in tables.items()
        if value is not None
    }


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except NufedError as error:
        sys.exit(f"paper: {error}")
    except KeyboardInterrupt:
        sys.exit("paper: stopped; the same command goes on with the stage that was running")
