"""Runs whose processes are killed at random moments resume to the same bits."""

import os
import random
import shutil
import signal
import time
from contextlib import suppress

import pytest

import nufed
from nufed.simulation import start_method
from processes import Child, descendants, wait_for
from support import file_hashes

pytestmark = pytest.mark.skipif(start_method() != "fork", reason="this system can't fork safely")

CONFIG = {
    "rounds": 12,
    "eval_every": 4,
    "checkpoint_every": 2,
    "save_every": 5,
    "participation": 0.5,
    "engine": "batched",
    "baselines": ["majority", "untrained"],
    "data": {"agents": 6, "samples_per_agent": 24, "dirichlet": 0.5, "test": 0.25},
    "model": {"args": {"hidden": [8]}},
    "method": {"adapt_lr": 0.1, "meta_lr": 0.1, "batch_size": 6, "local_steps": 2},
    "methods": {
        "fo": {"algorithm": "gmeta", "curvature": "first_order"},
        "hf": {"algorithm": "gmeta", "curvature": "hessian_free"},
        "exact": {"algorithm": "gmeta", "curvature": "exact"},
        "scaffold": {},  # agents of these two keep a state
        "ditto": {},
    },
}


@pytest.fixture
def start(tmp_path, no_report):
    """Starts or resumes a run in a separate process."""

    def begin(path, config, workers):
        if (path / "run.json").exists():
            return Child(lambda: nufed.resume(path), tmp_path)
        if path.exists():  # killed before run.json was written
            shutil.rmtree(path)
        return Child(lambda: nufed.run(config, [f"workers={workers}"], out=path), tmp_path)

    return begin


@pytest.fixture
def whole(tmp_path, start):
    """Runs a configuration without a kill: its files, and the time from run.json to its end."""

    def run(config, workers):
        path = tmp_path / "whole"
        assert start(path, config, workers).wait() == 0
        return file_hashes(path), time.time() - (path / "run.json").stat().st_mtime

    return run


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_a_run_killed_at_a_random_moment_resumes_to_the_same_bits(
    tmp_path, start, whole, tell, kills, workers
):
    right, seconds = whole(CONFIG, workers)
    for name in ("scaffold", "ditto"):
        assert any(f"methods/{name}/seed-0/states/" in file for file in right)
    rng, hit, begun = random.Random(workers), 0, 0
    for number in range(kills):
        path = tmp_path / f"run-{number}"
        child = start(path, CONFIG, workers)
        if number % 10:  # the others may be killed before run.json is written
            wait_for((path / "run.json").exists)
        time.sleep(rng.uniform(0, seconds))
        child.kill()
        hit += child.wait() == -signal.SIGKILL
        begun += (path / "run.json").exists()
        again = start(path, CONFIG, workers)
        assert again.wait() == 0, again.error
        assert file_hashes(path) == right
        shutil.rmtree(path)
    tell(
        f"kills: {kills} runs with workers={workers} killed at random moments of {seconds:.1f} s "
        f"({hit} before their end, {begun} after run.json): all {kills} resumed to equal "
        f"hashes of {len(right)} files"
    )


def one_method(config):
    """Fewer parts than workers, so that each part has several workers."""
    return {**config, "methods": {"scaffold": {}}, "baselines": [], "engine": "direct"}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "config", [CONFIG, one_method(CONFIG)], ids=["workers of parts", "workers of rounds"]
)
def test_a_killed_worker_is_named_and_the_run_resumes_to_the_same_bits(
    tmp_path, start, whole, tell, config, kills
):
    right, seconds = whole(config, 2)
    rng, killed, stopped, told = random.Random(0), 0, 0, 0
    while killed < kills:
        path = tmp_path / "run"
        child = start(path, config, 2)
        wait_for(lambda child=child: descendants(child.pid))
        time.sleep(rng.uniform(0, seconds))
        if workers := sorted(descendants(child.pid)):
            with suppress(ProcessLookupError):  # it has exited
                os.kill(rng.choice(workers), signal.SIGKILL)
                killed += 1
        code = child.wait()
        assert code in (0, 2), code
        failures = [file.read_text() for file in path.rglob("failure.json")]
        reasons = [child.error, *failures]
        if code or failures:
            stopped += 1
            told += any("a worker process was killed by SIGKILL" in reason for reason in reasons)
            again = start(path, config, 2)
            assert again.wait() == 0, again.error
        assert file_hashes(path) == right
        shutil.rmtree(path)
    assert told == stopped
    tell(
        f"workers: {kills} of {'parts' if config is CONFIG else 'rounds'} killed, {stopped} runs "
        f"stopped and named it, {kills - stopped} continued without it; all {kills} ended with "
        "equal hashes"
    )
