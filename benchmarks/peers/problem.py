"""The job of all contestants: the paper's network on random data, in files that they share."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from jobs import METHODS, QUICK, Sizes, paper_module

from nufed import Federation
from nufed.data import as_samples, make_split

__all__ = [
    "EVALUATION",
    "EVALUATION_STEPS",
    "LOCAL_STEPS",
    "METHODS",
    "load",
    "paper_module",
    "sizes_of",
    "write",
]

LOCAL_STEPS, EVALUATION, EVALUATION_STEPS = 4, "evaluation", 3


def sizes_of(quick):
    return QUICK if quick else Sizes()


def write(folder, sizes):
    """Random samples and each agent's rows, as files."""
    rng = np.random.default_rng(0)
    number = sizes.agents * sizes.samples
    np.save(folder / "inputs.npy", rng.random((number, sizes.inputs), dtype=np.float32))
    np.save(folder / "targets.npy", rng.integers(0, 10, number))
    np.save(folder / "rows.npy", rng.permutation(number).reshape(sizes.agents, sizes.samples))


def load(folder):
    """The agents' samples, mapped into memory: four fifths for training, the rest for test."""
    inputs, targets, rows = (
        np.load(Path(folder) / f"{name}.npy", mmap_mode="c")
        for name in ("inputs", "targets", "rows")
    )
    split = make_split(list(rows), 0, validation=0, test=0.2)
    return Federation(as_samples((inputs, np.array(targets))), split)
