"""Flower's simulation on one machine, by Ray: the same bits, loopback only, and nothing is left."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flower.in_memory import agents_data
from flower.test_loopback import APP, LONGEST, TESTS, end_all, plan
from flower.test_parity import simulated
from nufed.flower import SETTINGS
from processes import alive, descendants, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason='no Ray: pip install "nufed[ray]"'),
]
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too: listen on loopback only
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what it does by default is announced to change
}
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # as in /proc/net
SCRIPT = """
import json
from pathlib import Path

import app
from flower.test_ray import look
from flwr.simulation import run_simulation
from nufed.flower import server_app


def finish(outcome):
    Path("seen.json").write_text(json.dumps(look()))
    app.finish(outcome)


server = server_app(lambda context: app.plan(), finish)
run_simulation(server, app.site, 2, backend_config={"client_resources": {"num_cpus": 1}})
"""


def look():
    """This process and those below it, and the addresses they listen on, as in /proc/net."""
    pids = [os.getpid(), *descendants(os.getpid())]
    files = [file for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir()]
    mine = {str(file.readlink()) for file in files if file.is_symlink()}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()
    ]
    open_ones = [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine]
    return pids, [line[1].split(":")[0] for line in open_ones]


@pytest.mark.timeout(LONGEST + 60)
def test_the_same_apps_simulated_by_flower_give_the_simulators_model_and_scores(tmp_path):
    (tmp_path / "app.py").write_text(APP.format(out=tmp_path))
    (tmp_path / "simulate.py").write_text(SCRIPT)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Ray's sockets need a short path
        environment = {
            **os.environ,
            **SETTINGS,
            **RAY,
            "RAY_TMPDIR": folder,
            "FLWR_HOME": str(tmp_path / "home"),
            "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent / "src"))),
        }
        try:
            done = subprocess.run(
                [sys.executable, "simulate.py"],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LONGEST,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            pids, addresses = json.loads((tmp_path / "seen.json").read_text())
            wait_for(lambda: not alive(pids))
        finally:
            end_all(environment["FLWR_HOME"])
    assert len(pids) > 1 and addresses and set(addresses) <= LOOPBACK
    right, scores = simulated(plan(), agents_data(2))
    assert torch.equal(
        load_file(tmp_path / "model.safetensors")["model"], right[-1].server["model"]
    )
    assert json.loads((tmp_path / "scores.json").read_text()) == json.loads(
        json.dumps([each.record() for each in scores])
    )
