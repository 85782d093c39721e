"""The comparison with published numbers: what is trained and scored, and the page."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

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


def test_the_plain_loop_learns_and_is_on_the_page(external, monkeypatch):
    import external_plain

    setting = {**external.SETTING, "method": {**external.SETTING["method"], "local_epochs": 4}}
    monkeypatch.setattr(external_plain, "SETTING", setting)
    for name in ("RUNS", "RESULTS", "PAGE"):
        monkeypatch.setattr(external_plain, name, getattr(external, name))
    both = images(1200, 0), images(30, 1)
    monkeypatch.setattr(external_plain, "DATA", {"cifar10": lambda: both})
    halves = {"train": torch.randperm(1200), "train_sizes": torch.tensor([500, 700])}
    splits = external.RUNS / "cifar10" / "splits"
    splits.mkdir(parents=True)
    save_file(halves, splits / "seed-0.safetensors")
    curves = {method: {"0": [0.5]} for method in ("fedavg", "fedprox", "scaffold")}
    about = {"rounds": 1, "trained_on": 1200, "scored_on": 30, "accuracy": curves}
    external.RESULTS.write_text(json.dumps({"cifar10": about}))

    def curve(*rounds):
        for number in rounds:
            monkeypatch.setattr("sys.argv", ["external_plain.py", "--rounds", number])
            external_plain.main()
        (external.RUNS / "plain.safetensors").unlink()
        return json.loads(external.RESULTS.read_text())["cifar10"]["plain"]

    whole = curve("2")
    assert whole[-1] > 0.9
    assert curve("1", "2") == whole  # the second call resumes
    assert "| plain PyTorch on nufed's split, 1 seed | 2 |" in external.PAGE.read_text("utf-8")


def test_augmented_images_are_shifted_or_flipped(external):
    import external_plain

    torch.manual_seed(0)
    image = torch.zeros(1, 3, 12, 12)
    image[0, 1, 5, 6] = 7  # a dot in one channel
    for _ in range(20):
        found = external_plain.augmented(image)
        assert found.shape == image.shape and found.sum() == 7
        _, channel, row, column = found.nonzero()[0].tolist()
        assert channel == 1 and abs(row - 5) <= 4 and abs(column - 5.5) <= 4.5


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
