"""The comparison with published numbers: what is trained and scored, and the page."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.func import functional_call

from nufed import Objective, Samples, load_run
from nufed.models import lenet5
from nufed.simulation import DirectEngine, train

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
    for name, sizes in {"cifar10": (40_000, 10_000), "mnist": (60_000, 10_000)}.items():
        agents, held_out = external.DATA[name]()
        assert (len(agents), len(held_out)) == sizes and held_out.owners is None


@pytest.fixture
def maml(monkeypatch):
    """The module, six tasks and two newcomers of random drawings, and its network, small."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import external_maml

    monkeypatch.setattr(external_maml, "COHORT", 3)
    monkeypatch.setattr(external_maml, "VALIDATION", 2)
    images = torch.randint(0, 256, (20, 4, 4, 5, 5), dtype=torch.uint8)
    torch.manual_seed(0)
    objective = Objective(external_maml.network(25, (6, 4)))
    return external_maml, external_maml.tasks(images, 6, 2, 8, seed=0), objective


def test_a_round_is_an_iteration_of_maml(maml):
    """Against autograd through the unrolled step, and Adam without bias correction."""
    maml, federation, objective = maml
    w = objective.initial()
    engine = DirectEngine(objective, federation, seed=0)
    *_, last = train(maml.method(), engine, w, rounds=1, participation=0.5)
    module = objective.module(w, training=True)
    parameters = {n: p.detach().requires_grad_() for n, p in module.named_parameters()}

    def loss(parameters, inputs, targets):
        return F.cross_entropy(functional_call(module, parameters, (inputs,)), targets)

    total = 0
    for agent in last.cohort:
        batches = federation.batches(agent, 0, "train", 1)
        ((x, y, _),) = batches.draw("adapt", 5, pool="support")
        ((asked, wanted, _),) = batches.draw("outer", 5, pool="query")
        assert sorted(y.tolist()) == sorted(wanted.tolist()) == list(range(5))
        gradients = torch.autograd.grad(
            loss(parameters, x, y), list(parameters.values()), create_graph=True
        )
        pairs = zip(parameters.items(), gradients, strict=True)
        total = total + loss({n: p - 0.4 * g for (n, p), g in pairs}, asked, wanted) / 3
    assert len(last.cohort) == 3
    every = torch.autograd.grad(total, list(parameters.values()))
    d = torch.cat([g.flatten() for g in every])
    m, v = (last.server[f"optimizer_{name}"] for name in ("momentum", "variance"))
    scale = d.abs().max().item()
    torch.testing.assert_close(m, -0.1 * d, rtol=1e-3, atol=1e-5 * scale)
    torch.testing.assert_close(v, 0.001 * d**2, rtol=1e-3, atol=1e-6 * scale**2)
    torch.testing.assert_close(last.server["model"], w + 0.001 * m / (v.sqrt() + 1e-8))


def test_tasks_share_no_character_with_newcomers(maml):
    maml, federation, _ = maml
    split, images = federation.split, 20 * 4 * 4
    split.check(len(federation.samples))
    seen, new = (
        {int(row) % images // 16 for agent in group for row in split.train[agent]}
        for group in (split.seen, split.unseen)
    )
    assert len(split.unseen) == 2 and not seen & new
    for agent in split.seen:
        rows = split.train[agent]
        turned, labels = rows % 4, federation.samples.targets[rows].tolist()
        assert labels == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert (turned[::2] == turned[1::2]).all() and len(set(rows)) == 10


def test_training_on_tasks_resumes_and_is_on_the_page(maml, tmp_path):
    import external_page

    maml, federation, objective = maml

    def curve(folder, *rounds):
        for number in rounds:
            found = maml.trained(federation, objective, number, 0, tmp_path / folder, every=2)
        return [(at["round"], at["accuracy"]) for at in found], found

    whole, found = curve("whole", 4)
    assert curve("parts", 2, 4)[0] == whole and [k for k, _ in whole] == [2, 4]
    results = {"maml": {"0": {"curve": found, "centroid": maml.centroid(federation)}}}
    external_page.write(results, tmp_path / "external.md")
    text = (tmp_path / "external.md").read_text("utf-8")
    assert f"| nufed, seed 0 | 4 | {100 * whole[-1][1][1]['mean']:.1f} ±" in text
    assert "| Finn et al. 2017, table 1 (± over tasks) | 60,000 |  | 89.7 ± 1.1 |" in text


def test_drawings_are_shrunk_by_a_lanczos_filter(maml):
    weights = maml[0].lanczos()
    assert weights.shape == (28, 105)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(weights, weights.flip(0, 1), atol=1e-6)
    ramp = (torch.arange(105) + 0.5) / 105  # is kept but for the edges
    np.testing.assert_allclose((weights @ ramp)[4:-4], (torch.arange(4, 24) + 0.5) / 28, atol=1e-3)
