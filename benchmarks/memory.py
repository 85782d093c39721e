"""The memory of a large model: the peak of one whole run, in a separate process.

    python benchmarks/memory.py first_order direct 7000 3850

trains a fully connected network with these hidden layers, 48.5 million parameters, for two rounds
on four agents with one worker, including evaluations, checkpoints, null baselines, bundle and
report, but without figures. Prints the peak resident memory of the process, `base` before the run
(after a small one, which loads the libraries), and the ratio of the peak to the model.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import nufed

# large blocks are mapped from the system, so that freed memory is returned to it
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
INPUTS, AGENTS = 3072, 4


def in_own_process(curvature, engine, hidden):
    """The result of :func:`peak_of` in a fresh process."""
    command = [sys.executable, __file__, curvature, engine, *map(str, hidden)]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def settings(curvature, engine, hidden):
    return {
        "rounds": 2,
        "participation": 1.0,
        "eval_every": 1,
        "checkpoint_every": 1,
        "workers": 1,
        "engine": engine,
        "data": {"agents": AGENTS, "partition": "iid"},
        "model": {"name": "fcnn", "args": {"hidden": list(hidden)}},
        "method": {"adapt_steps": 3, "meta_lr": 0.01, "local_steps": 2, "batch_size": 4},
        "methods": {"gmeta": {"curvature": curvature}},
    }


def peak_of(curvature, engine, hidden):
    """Peak memory of a run, in bytes and in model sizes."""
    rng = np.random.default_rng(0)
    inputs = rng.random((24 * AGENTS, INPUTS), dtype=np.float32)
    data = inputs, np.tile(np.arange(4), 6 * AGENTS)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        small = settings(curvature, engine, [2])  # libraries are loaded while a run needs them
        nufed.run(small, data=data, out=Path(folder) / "small", figures=False)
        base = resident("VmRSS")
        run = nufed.run(settings(curvature, engine, hidden), data=data, out=out, figures=False)
        path = run.path / "methods" / "gmeta" / "seed-0" / "model.safetensors"
        model = path.stat().st_size
    peak = resident("VmHWM")
    return {
        "engine": run.engines["gmeta"],
        "model": model,
        "base": base,
        "peak": peak,
        "ratio": peak / model,
    }


def resident(which):
    """A field of /proc/self/status in bytes, where that exists; else the peak so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = status.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(peak_of(*sys.argv[1:3], [int(width) for width in sys.argv[3:]])))
