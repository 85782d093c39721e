"""Smoke test of `make bench`: every job at a tiny size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nufed.simulation import can_fork

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(900)
@pytest.mark.skipif(not can_fork(), reason="workers and their memory are measured on Linux")
def test_every_job_of_the_benchmark_runs_to_its_end(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/bench.py", "--quick", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "bench.json").read_text())
    kept = json.loads((ROOT / "benchmarks/results/bench.json").read_text())
    assert results.keys() == kept.keys()  # the committed results come from the same jobs
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (ROOT / "benchmarks/results").iterdir()
    }
    assert results["large"].keys() <= kept["large"].keys()
    assert all(len(results["sweeps"][sweep]) == 2 for sweep in kept["sweeps"])
