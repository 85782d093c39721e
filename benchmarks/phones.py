"""A round of a million agents in simulation, by the size of its cohort: CPU-seconds and memory.

    python benchmarks/phones.py [--agents 1000000] [--cohorts 10 100 1000 10000]

trains FedAvg on digits for two rounds with each cohort, in this process; agents draw their samples
lazily from the whole data. Prints a row for each cohort, and CPU-seconds per update in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from nufed import Federation, FirstOrder, GMeta, Objective
from nufed.data import digits
from nufed.data.partition import DirichletReusing
from nufed.data.split import lazy_split
from nufed.models import fcnn
from nufed.simulation import BatchedEngine, train

ROUNDS = 2
Row = tuple[int, float, float]


def measure(agents: int, cohorts: Sequence[int]) -> list[Row]:
    """For each cohort its size, CPU-seconds per round, and the peak memory of rounds in MB."""
    torch.set_num_threads(1)
    samples = digits()
    labels = np.asarray(samples.targets)
    split = lazy_split(DirichletReusing(labels, agents, (20, 5, 5), concentration=0.1, seed=0), ())
    objective = Objective(fcnn((8, 8), 10, hidden=(64,)))
    engine = BatchedEngine(objective, Federation(samples, split), seed=0)
    algorithm = GMeta(0, FirstOrder(), meta_lr=0.1, local_steps=2, batch_size=8)
    rows = []
    for cohort in (min(cohorts), *cohorts):  # the first is for what is loaded once
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
        before, began = resident("VmRSS"), time.process_time()
        w = objective.initial()
        *_, last = train(algorithm, engine, w, rounds=ROUNDS, participation=cohort / agents)
        assert len(last.taken) == cohort
        seconds = (time.process_time() - began) / ROUNDS
        rows.append((cohort, seconds, (resident("VmHWM") - before) / 1e6))
    return rows[1:]


def resident(which: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=10**6)
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 100, 1000, 10000])
    options = parser.parse_args()
    for cohort, seconds, memory in measure(options.agents, options.cohorts):
        print(f"| {cohort:,} | {seconds:.3f} | {1e3 * seconds / cohort:.3f} | {memory:.1f} |")
