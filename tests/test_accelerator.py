"""Runs the tests in ``tests/accelerated`` in a process of their own, where the test accelerator is
registered (``accelerator.py`` says why)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "accelerated"
SOME = "fedavg-kept or gmeta-exact or ditto or moon or fedproto- or fedamp or samples or sums"
EVERY_ALGORITHM = "test_algorithms or test_copies"
"""Files whose tests run for every algorithm, of which `make test` takes some."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "chosen",
    [f"not ({EVERY_ALGORITHM}) or {SOME}", pytest.param(EVERY_ALGORITHM, marks=pytest.mark.slow)],
    ids=["some", "every algorithm"],
)
def test_on_the_test_accelerator(chosen, tmp_path):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "-k", chosen, "--basetemp", tmp_path / "own", FOLDER],
        cwd=FOLDER.parents[1],
        env=os.environ | {"NUFED_TEST_ACCELERATOR": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    ran = {
        file.name
        for file in FOLDER.glob("test_*.py")
        if f"accelerated/{file.name} ." in done.stdout
    }
    assert len(ran) == (2 if chosen == EVERY_ALGORITHM else 5), done.stdout
