"""The memory of a run whose model is mostly frozen, summed over its processes (PSS).

    python benchmarks/frozen_memory.py            # 23 million parameters, 0.2 million trained

Trains a network of which only the last layers are trained, with 50 agents and two workers, once
with 100 frozen layers and once with one. Prints the increase of the peak, in sizes of the frozen
part: 1 would be one copy for everything. It looks at every round and evaluation and in between, so
that a busy machine misses no process. Pages of files (libraries) are left out: their share changes
with whatever else runs. Linux only (/proc).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import nufed

INPUTS, WIDTH, AGENTS = 64, 480, 50
LARGE, TINY = 100, 1  # frozen layers
INTERVAL = 0.05  # seconds between two looks
COUNTED = "Pss_Anon:", "Pss_Shmem:"  # lines of /proc/PROCESS/smaps_rollup


class Mostly(nn.Module):
    """Frozen residual layers of 480 × 480 numbers, and a trained head of 0.2 million."""

    def __init__(self, layers):
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # as a pretrained part: the same for every seed
            torch.manual_seed(0)
            self.up = nn.Linear(INPUTS, WIDTH)
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.mix, self.head = nn.Linear(WIDTH, 410), nn.Linear(410, 10)

    def forward(self, x):
        x = self.up(x)
        for block in self.blocks:
            x = x + block(x).relu() / len(self.blocks)
        return self.head(self.mix(x.tanh()).relu())


def run(layers, method):
    """Train, with the peak of memory that was seen."""
    rng = np.random.default_rng(0)
    data = rng.random((20 * AGENTS, INPUTS), dtype=np.float32), rng.integers(0, 10, 20 * AGENTS)
    config = {
        "rounds": 3,
        "participation": 0.2,
        "seeds": [0, 1],
        "workers": 2,
        "engine": "direct",
        "data": {"agents": AGENTS, "partition": "iid", "test": 0.2},
        "method": {"batch_size": 4, "local_steps": 2},
        "methods": {"m": method},
    }
    peak, done = [0], threading.Event()

    def look(event=None):  # workers that have sent their last event are still there
        peak[0] = max(peak[0], proportional(os.getpid()))

    def watch():
        while not done.wait(INTERVAL):
            look()

    watcher = threading.Thread(target=watch, daemon=True)
    with tempfile.TemporaryDirectory() as folder:
        watcher.start()
        out, model = f"{folder}/run", partial(Mostly, layers)
        nufed.run(config, data=data, model=model, out=out, figures=None, on_progress=look)
        done.set()
        watcher.join()
    frozen = sum(p.nbytes for p in Mostly(layers).parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in Mostly(layers).parameters() if p.requires_grad)
    return {"peak": peak[0], "frozen": frozen, "trained": trained}


def proportional(process):
    """The proportional set size of a process and its children without files, in bytes.

    0 if a process began or ended meanwhile: pages that it shares would count twice.
    """
    total, processes = 0, [process, *children(process)]
    for each in processes:
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            return 0
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(COUNTED))
    return total if processes == [process, *children(process)] else 0


def children(process):
    """All processes that descend from one."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            direct = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        found += [each for child in direct for each in (child, *children(child))]
    return found


def measure(large=LARGE, tiny=TINY, method="fedavg"):
    """The increase of the peak from a tiny to a large frozen part, in sizes of this part."""
    rows = []
    for layers in (large, tiny):
        words = [sys.executable, __file__, "--layers", str(layers), "--method", method]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    increase = (rows[0]["peak"] - rows[1]["peak"]) / (rows[0]["frozen"] - rows[1]["frozen"])
    return {"increase": increase, **rows[0], "tiny_peak": rows[1]["peak"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="measure one run with so many frozen layers")
    parser.add_argument("--method", default="fedavg")
    options = parser.parse_args()
    methods = {
        "fedavg": {"algorithm": "fedavg"},
        "first_order": {"algorithm": "gmeta", "curvature": "first_order"},
        "exact": {"algorithm": "gmeta", "curvature": "exact"},
        "hessian_free": {"algorithm": "gmeta", "curvature": "hessian_free"},
    }
    if options.layers:
        print(json.dumps(run(options.layers, methods[options.method])))
        return
    for name in methods:
        row = measure(method=name)
        print(
            f"{name}: {row['frozen'] / 4e6:.1f} million frozen and {row['trained'] / 1e6:.1f} "
            f"million trained parameters; the peak is {row['increase']:.2f} frozen parts higher"
        )


if __name__ == "__main__":
    main()
