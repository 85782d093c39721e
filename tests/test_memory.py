"""Peak memory of the meta-gradient and of whole runs, measured in separate processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)

SCRIPT = """
import torch
from pathlib import Path
from torch import nn
import nufed

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

torch.set_num_threads(1)
width = 1500
objective = nufed.Objective(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)))
batch = (torch.randn(2, width), torch.tensor([0, 1]))

def run(steps):
    meta = nufed.MetaBatch([batch] * steps, batch, [batch] * steps)
    nufed.meta_gradient(objective, w, meta, lr=0.01, curvature=nufed.Exact())

w = objective.initial()
run(1)  # what is allocated once
for steps in (1, 20):
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = status("VmRSS")
    run(steps)
    print(status("VmHWM") - before)
print(w.nbytes)
"""


@linux
def test_exact_grows_by_one_vector_per_step():
    # allocate large blocks with mmap, so that freed memory is returned to the system
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    one, twenty, vector = map(int, done.stdout.split())
    assert twenty - one <= 20 * vector
    assert twenty - one >= 15 * vector  # check that the measurement is sensitive


@linux
@pytest.mark.parametrize(
    ("curvature", "engine", "most"),
    [("first_order", "direct", 9), pytest.param("exact", "auto", 17, marks=pytest.mark.slow)],
)
def test_a_run_takes_few_times_the_memory_of_its_model(monkeypatch, curvature, engine, most):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import memory

    found = memory.in_own_process(curvature, engine, [1300, 1000])
    assert found["engine"] == {"direct": "direct", "auto": "gram_onednn"}[engine]
    assert (found["peak"] - found["base"]) / found["model"] < most
