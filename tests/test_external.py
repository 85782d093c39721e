"""The comparison with published numbers: what is trained and scored, and the page."""

import json
from pathlib import Path

import pytest
import torch

from nufed import Objective, Samples, load_run
from nufed.models import lenet5

ROOT = Path(__file__).parent.parent


@pytest.fixture
def external(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import external

    monkeypatch.setattr(external, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(external, "RESULTS", tmp_path / "external.json")
    monkeypatch.setattr(external, "PAGE", tmp_path / "external.md")
    return external


def images(number, seed):
    """Bytes whose class is the brighter half."""
    torch.manual_seed(seed)
    targets = torch.arange(number) % 2
    inputs = torch.randint(0, 99, (number, 12, 12), dtype=torch.uint8)
    inputs[targets == 1, :6] += 99
    return Samples(inputs, targets, ("dark", "bright"), scale=1 / 255)


def test_it_trains_extends_and_writes_the_page(external, monkeypatch):
    setting = {**external.SETTING, "method": {**external.SETTING["method"], "local_epochs": 1}}
    monkeypatch.setattr(external, "SETTING", {**setting, "workers": 1})
    both = images(1200, 0), images(30, 1)
    monkeypatch.setattr(external, "DATA", {name: lambda: both for name in external.DATA})
    for rounds in ("1", "2"):  # the second call continues
        monkeypatch.setattr("sys.argv", ["external.py", "--rounds", rounds, "--data", "mnist"])
        external.main()
    found = json.loads(external.RESULTS.read_text())
    curves = found["mnist"]["accuracy"]
    assert set(curves) == {"fedavg", "fedprox", "scaffold"}
    assert all(len(curve) == 2 for seeds in curves.values() for curve in seeds.values())
    run = load_run(external.RUNS / "mnist")
    assert {len(metrics.cohort) for metrics in run.methods["fedavg"][0].metrics[1:]} == {10}
    page = external.PAGE.read_text("utf-8")
    assert "MNIST was trained for 2 rounds" in page and "{%" not in page
    assert f"| nufed, 1 seed | 2 | {100 * curves['fedavg']['0'][-1]:.1f} |" in page


def test_the_score_is_the_accuracy_on_all_held_out_images(external, monkeypatch):
    monkeypatch.setattr(external, "CHUNK", 7)
    held_out = images(30, 1)
    module = lenet5((12, 12), 2)
    objective = Objective(module)
    outputs = module(held_out.inputs / 255)
    right = (outputs.argmax(1) == held_out.targets).double().mean().item()
    assert external.accuracy(objective, objective.initial(), held_out) == round(right, 5)


def test_data_sets_hold_out_what_is_scored(external, real_data):
    for name, (train, scored) in {"cifar10": (40_000, 10_000), "mnist": (60_000, 10_000)}.items():
        agents, held_out = external.DATA[name]()
        assert (len(agents), len(held_out)) == (train, scored) and held_out.owners is None
