"""Nodes of Ray on this machine: one is killed in the middle of a run, and so is a driver."""

import os
import shutil
import subprocess
from importlib.util import find_spec

import pytest

import nufed
from flower.app.test_ray_simulation import LOOPBACK, listening
from lab.experiment.test_array_parts import CONFIG
from nufed.lab.config import load_config
from processes import NUFED, alive, descendants, wait_for
from simulation.ray_nodes import RAY, nodes
from support import file_hashes, without_report

pytestmark = [
    pytest.mark.timeout(3600),  # Ray is slow where others work: wait for it, and don't measure it
    pytest.mark.skipif(find_spec("ray") is None, reason='no Ray: pip install "nufed[ray]"'),
]
slow = pytest.mark.slow  # `make test-cluster`; `make test` has the short version, if Ray is there
LONG = {**CONFIG, "rounds": 120, "eval_every": 40, "checkpoint_every": 5}
ONE = {**LONG, "seeds": [0], "methods": {"ditto": {"algorithm": "ditto"}}, "baselines": []}
ONE |= {"rounds": 60, "participation": 1.0, "engine": "direct"}  # every agent is a task
SHORT = {**LONG, "seeds": [0], "rounds": 20, "checkpoint_every": 1, "baselines": []}


@pytest.fixture(scope="module")
def cluster():
    with nodes() as running:
        yield running


def whole_run(config, folder):
    """A file, and its ordinary run."""
    (folder / "mine.toml").write_text(load_config(config).to_toml())
    with without_report():
        nufed.run(folder / "mine.toml", out=folder / "run")
    return folder


@pytest.fixture(scope="module", params=["parts", "agents"])
def job(request, tmp_path_factory):
    """A file whose parts, or agents, go to the nodes, and its ordinary run."""
    config = {"parts": LONG, "agents": ONE}[request.param]
    return whole_run(config, tmp_path_factory.mktemp("whole"))


def start(cluster, *arguments):
    return subprocess.Popen(
        [*NUFED, "run", *arguments, "--ray", cluster.address, "--no-figures"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **RAY},
    )


def begun(out, process):
    """Wait until checkpoints have reached the driver's directory."""
    wait_for(lambda: process.poll() is not None or any(out.rglob("checkpoint-*")), 1200)
    assert process.poll() is None, process.communicate()


def same(out, job):
    expected = file_hashes(job / "run")
    return {name: hash for name, hash in file_hashes(out).items() if name in expected} == expected


def test_a_short_run_survives_the_loss_of_a_node_that_works(tmp_path):
    job, out = whole_run(SHORT, tmp_path), tmp_path / "on nodes"
    with nodes(2, soon=True) as cluster:
        process = start(cluster, job / "mine.toml", "--out", out)
        while not cluster.kill_one_of(process):  # one node was so slow that the other did it all
            process.communicate()
            shutil.rmtree(out)
            process = start(cluster, job / "mine.toml", "--out", out)
        printed, warned = process.communicate()
    assert process.returncode == 0, warned
    assert "was lost while working on" in warned
    assert "report: " in printed and same(out, job)


@slow
def test_a_node_is_killed_in_the_middle(job, cluster, tmp_path):
    out = tmp_path / "run"
    process = start(cluster, job / "mine.toml", "--out", out)
    begun(out, process)
    addresses = listening(descendants(cluster.pid) | descendants(process.pid))
    assert cluster.kill_one_of(process)
    printed, warned = process.communicate()
    cluster("add")
    assert process.returncode == 0, warned
    assert "was lost while working on" in warned
    assert "report: " in printed and same(out, job)
    assert addresses and addresses <= LOOPBACK


@slow
def test_the_driver_is_killed_and_resumed_on_the_cluster(job, cluster, tmp_path):
    out = tmp_path / "run"
    process = start(cluster, job / "mine.toml", "--out", out)
    begun(out, process)
    process.kill()
    process.communicate()
    again = start(cluster, "--resume", out)
    _printed, warned = again.communicate()
    assert again.returncode == 0, warned
    assert same(out, job)


@slow
@pytest.mark.parametrize("time", range(3))  # where Ray places actors is random
def test_a_run_starts_just_after_a_node_died(time, cluster, tmp_path):
    """Ray does not know yet, and places actors there."""
    job = whole_run(SHORT, tmp_path)
    cluster("kill idle")
    process = start(cluster, job / "mine.toml", "--out", tmp_path / "on nodes")
    _printed, warned = process.communicate()
    cluster("add")
    assert process.returncode == 0, warned
    assert same(tmp_path / "on nodes", job)


@slow
def test_no_process_is_left():
    with nodes(2) as running:
        below = descendants(running.pid)
        assert below
    wait_for(lambda: not alive(below), 600)
