"""Flower's Ray-based simulation: the same bits, loopback only, no process left."""

import os
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from flower.ops.small_app import files_of, simulate, write_app
from processes import NUFED, alive, descendants, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(find_spec("ray") is None, reason='no Ray: pip install "nufed[flower,ray]"'),
]
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # as in /proc/net


def listening(pids):
    """The addresses that these processes listen on, as in /proc/net."""
    mine = set()
    for pid in pids:
        with suppress(OSError):  # it has ended, or closed a file
            mine |= {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()
    ]
    open_ones = [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine]
    return {line[1].split(":")[0] for line in open_ones}


def test_an_app_simulated_by_flower_leaves_the_simulators_files(tmp_path):
    app = write_app(tmp_path / "app", sites=2, rounds=2)
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.Popen(
            [*NUFED, "federate", "simulate", "app", "--out", "run"],
            cwd=tmp_path,
            stdout=printed,
            stderr=printed,
            env={**os.environ, "FLWR_HOME": str(tmp_path / "home")},
        )
    pids, addresses = set(), set()
    try:
        while process.poll() is None:
            below = descendants(process.pid)
            pids |= below
            addresses |= listening(below)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, (tmp_path / "printed").read_text()
    wait_for(lambda: not alive(pids))
    assert addresses and addresses <= LOOPBACK
    simulate(app, tmp_path / "simulated", names="{}")
    assert files_of(tmp_path / "run") == files_of(tmp_path / "simulated")
