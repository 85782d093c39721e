"""A smoke test of `make paper`: every stage at a tiny size, in about a minute."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nufed.data import Samples, as_samples, digits
from paper import summary, tuning
from paper.__main__ import do_stage
from paper.page import write
from paper.stages import STAGES, WHERE, Tables

AGENTS, SAMPLES = 6, 40


def samples(owners: bool = False, pixels: str = "unit") -> Samples:
    """A few handwritten digits instead of images; with owners for a natural federation."""
    all_of_them = digits()
    inputs, targets = all_of_them.take(np.arange(AGENTS * SAMPLES))
    if not owners:
        return as_samples((inputs, targets))
    return as_samples((inputs, targets, np.arange(AGENTS * SAMPLES) % AGENTS))


def shrink(tables: Tables) -> Tables:
    """The same stage on a few digits: six agents, two seeds, two rounds, a tiny network."""
    data: dict[str, Any] = dict(tables["data"])
    natural = data["source"] == "mnist-writers"
    data |= {"source": "paper.smoke:samples", "args": data.get("args", {}) | {"owners": natural}}
    data |= {"agents": AGENTS, "samples_per_agent": None if natural else SAMPLES}
    data["validation"] = 0.15 if data.get("validation") else 0.0
    data["unseen_agents"] = 2 if data.get("unseen_agents") else 0
    short = {
        "rounds": 2,
        "eval_every": 2,
        "seeds": tables["seeds"][:2],
        "participation": 0.5,
        "data": data,
        "model": {"name": "fcnn", "args": {"hidden": [6]}},
        "method": tables["method"] | {"local_steps": 1, "batch_size": 8},
        "methods": {
            name: own | ({"batch_size": 12} if "batch_size" in own else {})
            for name, own in tables["methods"].items()
        },
        "eval_agents": None,
        "workers": 1,
    }
    return tables | short


def run_all(folder: Path, stages: Iterable[str] = STAGES) -> Path:
    """Run the stages into a folder and write the page there."""
    before, first, most = dict(vars(WHERE)), tuning.FIRST, tuning.MAX_RUNS
    tuning.FIRST, tuning.MAX_RUNS = {"adapt_lr": range(1), "meta_lr": range(1, 3)}, 2
    vars(WHERE).update(
        runs=folder / "runs", results=folder / "results", page=folder / "results.md", shrink=shrink
    )
    summary.summary.cache_clear()
    try:
        for stage in stages:
            do_stage(stage)
        return write()
    finally:
        vars(WHERE).update(before)
        tuning.FIRST, tuning.MAX_RUNS = first, most
        summary.summary.cache_clear()
