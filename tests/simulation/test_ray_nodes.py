"""Three nodes of Ray on this machine: one is killed in the middle of a run, and so is a driver."""

import os
import subprocess
from importlib.util import find_spec

import pytest

import nufed
from experiment.test_array_parts import CONFIG
from flower.app.test_ray_simulation import LOOPBACK, listening
from nufed.config import load_config
from processes import NUFED, alive, descendants, wait_for
from simulation.ray_nodes import RAY, nodes
from support import file_hashes, without_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(find_spec("ray") is None, reason='no Ray: pip install "nufed[ray]"'),
]
LONG = {**CONFIG, "rounds": 120, "eval_every": 40, "checkpoint_every": 5}
ONE = {**LONG, "seeds": [0], "methods": {"ditto": {"algorithm": "ditto"}}, "baselines": []}
ONE |= {"rounds": 60, "participation": 1.0, "engine": "direct"}  # every agent is a task


@pytest.fixture(scope="module")
def cluster():
    with nodes() as running:
        yield running


@pytest.fixture(scope="module", params=["parts", "agents"])
def job(request, tmp_path_factory):
    """A file whose parts, or agents, go to the nodes, and its ordinary run."""
    folder = tmp_path_factory.mktemp("whole")
    config = {"parts": LONG, "agents": ONE}[request.param]
    (folder / "mine.toml").write_text(load_config(config).to_toml())
    with without_report():
        nufed.run(folder / "mine.toml", out=folder / "run")
    return folder


def start(job, out, cluster):
    return subprocess.Popen(
        [*NUFED, "run", job / "mine.toml", "--out", out, "--ray", cluster.address, "--no-figures"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **RAY},
    )


def begun(out, process):
    """Wait until checkpoints have reached the driver's directory."""
    wait_for(lambda: process.poll() is not None or any(out.rglob("checkpoint-*")), 300)
    assert process.poll() is None, process.communicate()


def same(out, job):
    expected = file_hashes(job / "run")
    return {name: hash for name, hash in file_hashes(out).items() if name in expected} == expected


def test_a_node_is_killed_in_the_middle(job, cluster, tmp_path):
    out = tmp_path / "run"
    process = start(job, out, cluster)
    begun(out, process)
    addresses = listening(descendants(cluster.pid) | descendants(process.pid))
    cluster("kill")
    printed, warned = process.communicate(timeout=900)
    cluster("add")
    assert process.returncode == 0, warned
    assert "was lost while working on" in warned
    assert "report: " in printed and same(out, job)
    assert addresses and addresses <= LOOPBACK


def test_the_driver_is_killed_and_resumed_on_the_cluster(job, cluster, tmp_path):
    out = tmp_path / "run"
    process = start(job, out, cluster)
    begun(out, process)
    process.kill()
    process.communicate()
    again = [*NUFED, "run", "--resume", out, "--ray", cluster.address, "--no-figures"]
    done = subprocess.run(
        again, capture_output=True, text=True, env={**os.environ, **RAY}, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert same(out, job)


def test_no_process_is_left():
    with nodes(2) as running:
        below = descendants(running.pid)
        assert below
    wait_for(lambda: not alive(below), 60)
