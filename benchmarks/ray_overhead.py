"""The overhead of a round whose agents are spread over nodes of Ray.

    python benchmarks/ray_overhead.py [--turns 3]

starts two nodes with one core each on this machine and measures seconds per round (the difference
of a long and a short run) with models of 1 MB and 100 MB: in one process, with two worker
processes, and on Ray. There is one local step on a small batch, so that vectors dominate. Without
Ray, that part is skipped.

With n nodes a round of T seconds in one process takes about T/n plus the overhead, so spreading its
agents pays from T = overhead · n/(n − 1) on: with two nodes from twice the overhead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import nufed

NODES = 2
COHORT = 4
JOBS = {  # hidden layers, and rounds of the short and the long run
    "1 MB": ([2600, 30], (5, 45)),
    "100 MB": ([4000, 6000], (1, 5)),
}
QUICK = {"8 kB": ([16, 40], (1, 2))}


def seconds_of_a_run(hidden, rounds, workers, address):
    config = {
        "rounds": rounds,
        "participation": 1.0,
        "eval_every": rounds,
        "checkpoint_every": rounds,
        "workers": workers,
        "engine": "direct",
        "baselines": [],
        "data": {"agents": COHORT},
        "model": {"name": "fcnn", "args": {"hidden": hidden}},
        "method": {"algorithm": "fedavg", "local_steps": 1, "batch_size": 5},
    }
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        nufed.run(config, out=Path(folder) / "run", figures=False, ray=address)
        return time.perf_counter() - start


def measure(jobs, turns, address):
    """Seconds per round of every contender and job, in turns; with Ray also its overhead."""
    contenders = {"one process": (1, None), "two workers": (2, None)}
    if address is not None:
        contenders[f"Ray, {NODES} nodes"] = (1, address)
    result = {}
    for name, (hidden, (few, many)) in jobs.items():
        times = {each: [] for each in contenders}
        seconds_of_a_run(hidden, few, 1, None)  # warms up
        for _ in range(turns):
            for each, settings in contenders.items():
                short, long = (seconds_of_a_run(hidden, n, *settings) for n in (few, many))
                times[each].append((long - short) / (many - few))
        result[name] = {"seconds": times}
        if address is not None:
            pairs = zip(times[f"Ray, {NODES} nodes"], times["one process"], strict=True)
            overhead = median(ray - one / NODES for ray, one in pairs)
            result[name] |= {"overhead": overhead, "pays from": overhead * NODES / (NODES - 1)}
        print(name, json.dumps(result[name]), file=sys.stderr)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from simulation.ray_nodes import RAY, nodes

    os.environ.update(RAY)
    with nodes(NODES, 1500) if find_spec("ray") else nullcontext() as cluster:
        print(json.dumps(measure(JOBS, turns, cluster and cluster.address), indent=1))


if __name__ == "__main__":
    main()
