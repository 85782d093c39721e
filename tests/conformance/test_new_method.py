"""Adding a method changes no other file: suite, listing, runs and pages take it as it is."""

import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import nufed
from conformance import cases, test_algorithms as suite
from conformance.toy_method import Toy
from nufed import Objective
from nufed.algorithms import ALGORITHMS
from nufed.lab.cli.listing import about, listing
from nufed.simulation import DirectEngine
from support import federation, mlp

ROOT = Path(__file__).parents[2]


def test_a_method_that_no_file_names_is_a_case_and_conforms(monkeypatch, tmp_path):
    monkeypatch.setitem(ALGORITHMS._built_in, "toy", Toy)
    monkeypatch.setitem(suite.CASES, "toy", runpy.run_path(cases.__file__)["CASES"]["toy"])
    tests = [test for name, test in vars(suite).items() if name.startswith("test_")]
    assert len(tests) >= 8
    for number, test in enumerate(tests):
        data = federation(unseen=1)
        given = {
            "algorithm": suite.CASES["toy"],
            "case": "toy",
            "spread": "all",
            "engine": DirectEngine(Objective(mlp()), data, seed=5),
            "tmp_path": tmp_path / str(number),
        }
        (tmp_path / str(number)).mkdir()
        test(**{name: given[name] for name in inspect.signature(test).parameters})


@pytest.mark.slow
def test_the_conformance_suite_runs_a_method_that_no_file_names():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conformance.toy_method", "-k", "toy"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", suite.__file__],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) >= 8


def test_listing_pages_and_runs_have_it(monkeypatch, tmp_path):
    monkeypatch.setitem(ALGORITHMS._built_in, "toy", Toy)
    assert listing()["algorithms"]["toy"].startswith("FedAvg that sends a part")
    assert any("share of the change" in text for text in about("toy")["settings"].values())
    script = runpy.run_path(str(ROOT / "docs/describe_algorithms.py"))
    assert "[`toy`](algorithms/toy.md)" in script["tables"]()
    assert "share of the change that is sent" in script["pages"]()["toy"]
    config = {
        "rounds": 1,
        "workers": 1,
        "data": {"agents": 3, "samples_per_agent": 20},
        "methods": {"toy": {"sent": 0.25, "batch_size": 5, "meta_lr": 0.2, "adapt_lr": 0.1}},
    }
    run = nufed.run(config, out=tmp_path / "run", figures=False)
    assert run.config.algorithms()["toy"] == Toy(sent=0.25, batch_size=5, meta_lr=0.2, adapt_lr=0.1)
