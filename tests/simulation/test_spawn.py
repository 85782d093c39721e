"""Spawned worker processes, as on macOS and Windows: the same bits as in one process."""

import multiprocessing
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch.nn.functional as F

import nufed
from lab.experiment.test_runner import SMALL
from nufed.lab.config import load_config
from nufed.lab.config.problem import Problem
from nufed.lab.experiment.setup import Setup
from nufed.simulation import start_method, unsendable
from simulation.test_worker_engine import files


@pytest.fixture
def spawn():
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def test_parts_in_spawned_processes_leave_the_bytes_of_one_process(spawn, tmp_path):
    assert start_method() == "spawn"
    small = {**SMALL, "rounds": 2, "baselines": ["majority"]}
    runs = [nufed.run(small, [f"workers={n}"], out=tmp_path / str(n)) for n in (1, 2)]
    assert files(runs[0].path) == files(runs[1].path)


@pytest.mark.parametrize("engine", [pytest.param("direct", marks=pytest.mark.slow), "gram"])
def test_agents_in_spawned_processes_leave_the_bytes_of_one_process(engine, spawn, tmp_path):
    config = {
        **SMALL,
        "seeds": [0],
        "methods": {"exact": {"algorithm": "gmeta"}},
        "engine": engine,
        "baselines": [],
    }
    config |= {"rounds": 2, "eval_every": 2}
    runs = [nufed.run(config, [f"workers={n}"], out=tmp_path / str(n)) for n in (1, 2)]
    assert files(runs[0].path) == files(runs[1].path)


def test_samples_are_shared_and_not_copied(spawn):
    setup = Setup.make(Problem.make(load_config(SMALL)))
    sent = bytes(ForkingPickler.dumps(setup))
    assert setup.samples.inputs.is_shared() and setup.samples.targets.is_shared()
    assert len(sent) < setup.samples.inputs.nbytes / 4
    again = multiprocessing.reduction.ForkingPickler.loads(sent)
    assert again.samples.inputs.data_ptr() == setup.samples.inputs.data_ptr()
    assert again.algorithms == setup.algorithms and again.engine_names == setup.engine_names


def test_objects_that_cannot_be_imported_mean_one_process_and_a_warning(spawn, tmp_path):
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets)

    with pytest.warns(UserWarning, match=r"this run uses one process.*loss.*in a module of their"):
        run = nufed.run(SMALL, ["workers=2", "rounds=1"], loss=loss, out=tmp_path / "run")
    assert set(run.methods) == {"fedavg", "hf", "exact"}
    assert unsendable(loss) and unsendable(F.cross_entropy) is None


SCRIPT = """
import multiprocessing
multiprocessing.set_start_method("spawn")
print("started")
import nufed, torch.nn.functional as F

def loss(outputs, targets):
    return F.cross_entropy(outputs, targets)

small = {"rounds": 1, "seeds": [0], "baselines": [], "data": {"agents": 4, "unseen_agents": 0}}
small |= {"method": {"batch_size": 5}, "methods": {"fedavg": {}, "gmeta": {}}}
nufed.run(small, ["workers=2"], out="plain", figures=False)
nufed.run(small, ["workers=2"], out="own", loss=loss, figures=False)
print("ended")
"""


def test_a_script_is_not_run_again_in_a_worker(tmp_path):
    """Without `if __name__ == "__main__"`, too; its own objects mean one process."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "started\nended\n"), done.stderr
    assert done.stderr.count("this run uses one process") == 1
    assert (tmp_path / "plain/report.html").exists() and (tmp_path / "own/report.html").exists()
