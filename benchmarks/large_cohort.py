"""Memory and time of the server's half of a round with many updates of a large model.

    python benchmarks/large_cohort.py [--updates 1000] [--numbers 10000000] [--rule mean]
                                      [--max-update-norm 100]

makes updates one by one, as they would arrive, passes each to the server's checks and sum, and
closes the round. Prints the peak of the process's memory above that with the model alone, in
models, and CPU-seconds per update. With `--rule median` all updates are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from nufed.algorithms import GMeta
from nufed.algorithms.aggregation import AGGREGATIONS
from nufed.algorithms.protocol import AgentUpdate, Context
from nufed.server import Progress, Rules, close_round, open_round

# large blocks are mapped from the system, so that freed memory is returned to it
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "1000000"}


def in_own_process(**options: object) -> dict[str, float]:
    """The result of :func:`measure` in a fresh process."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, __file__, *given]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def measure(updates: int, numbers: int, rule: str, max_update_norm: float) -> dict[str, float]:
    torch.set_num_threads(1)
    if numbers > 10:
        measure(100, 10, rule, max_update_norm)  # what is loaded once
    algorithm = GMeta(aggregation=AGGREGATIONS[rule]())
    w = torch.randn(numbers, generator=torch.Generator().manual_seed(0))
    context, rules = Context(1, updates, updates), Rules(max_update_norm=max_update_norm or None)
    # the median norm of an earlier round, as from the second round on
    before = Progress(0, {"model": w}, medians={"model": 0.01 * float(w.double().norm())})
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    base, began = resident("VmRSS"), time.process_time()
    incoming = open_round(algorithm, before, context, range(updates), rules)
    making = 0.0
    for agent in range(updates):
        now = time.process_time()
        vector = w * (1 + 0.01 * (agent + 1) / updates)
        making += time.process_time() - now
        incoming.add(AgentUpdate(agent, 1, 1, {"model": vector}))
        del vector
    server, rejected = close_round(algorithm, before.server, incoming, context, rules=rules)
    seconds = time.process_time() - began - making
    assert not rejected
    moved = (server["model"] - w).norm() / w.norm()
    assert abs(float(moved) - 0.005) < 0.001, "the mean of the changes is half of the largest"
    peak = resident("VmHWM") - base
    return {
        "updates": updates,
        "numbers": numbers,
        "model_MB": w.nbytes / 1e6,
        "peak_MB": peak / 1e6,
        "peak_in_models": peak / w.nbytes,
        "cpu_seconds_per_update": seconds / updates,
    }


def resident(which: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--numbers", type=int, default=10**7)
    parser.add_argument("--rule", default="mean", choices=sorted(AGGREGATIONS))
    parser.add_argument("--max-update-norm", type=float, default=0.0, help="0: off")
    print(json.dumps(measure(**vars(parser.parse_args()))))
