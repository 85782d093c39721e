"""Runs the tests in ``tests/accelerated`` in processes of their own, where the test accelerator is
registered (``accelerator.py`` says why)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "accelerated"
FILES = sorted(file.name for file in FOLDER.glob("test_*.py"))
SOME = "fedavg-kept or gmeta-exact or ditto or moon or fedproto- or fedamp or samples or sums"
EVERY_ALGORITHM = ("test_algorithms.py", "test_copies.py")
"""Files whose tests run for every algorithm, of which `make test` takes some."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", FILES)
def test_on_the_test_accelerator(file, tmp_path):
    run(file, tmp_path, ["-k", SOME] if file in EVERY_ALGORITHM else [])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", EVERY_ALGORITHM)
def test_every_algorithm_on_the_test_accelerator(file, tmp_path):
    run(file, tmp_path, [])


def run(file, tmp_path, options):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *options, "--basetemp", tmp_path / "own", FOLDER / file],
        cwd=FOLDER.parents[1],
        env=os.environ | {"NUFED_TEST_ACCELERATOR": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout
