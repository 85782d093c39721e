"""Bundles: saving and loading preserve bits, as does adapting; invalid data is named."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import nufed
from nufed import Bundle, InputError, Objective, load_adapted, load_bundle
from nufed.data import digits
from nufed.lab.bundle import Prediction
from support import Tied, same

CONFIG = {
    "rounds": 6,
    "seeds": [0, 1],
    "participation": 0.5,
    "workers": 1,
    "data": {"agents": 8, "samples_per_agent": 40, "dirichlet": 0.5, "unseen_agents": 2},
    "model": {"args": {"hidden": [8], "activation": "tanh"}},
    "method": {"adapt_steps": 2, "adapt_lr": 0.1, "meta_lr": 0.2, "batch_size": 6},
    "methods": {
        "fedavg": {"algorithm": "fedavg"},
        "gmeta-fo": {"algorithm": "gmeta", "curvature": "first_order"},
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return nufed.run(CONFIG, out=tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def some():
    samples = digits()
    return samples.inputs[:40], samples.targets[:40]


def small(**settings):
    """A bundle of a module of one's own, on 5 inputs and 3 classes."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    usual = {"input_shape": (5,), "adapt_lr": 0.1, "classes": ("a", "b", "c"), "batch_size": 8}
    return Bundle.of(module, **{**usual, **settings})


def data(rows=30, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 5)).astype(np.float32)
    return x, x[:, :3].argmax(axis=1)


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_a_run_writes_a_bundle_per_method_with_its_model(run):
    assert sorted(p.name for p in run.path.glob("bundles/*")) == [
        "fedavg.nufed",
        "gmeta-fo.nufed",
    ]
    for method in run.methods:
        bundle = load_bundle(run.path / "bundles" / f"{method}.nufed")
        trained = load_file(run.path / "methods" / method / "seed-0" / "model.safetensors")
        assert torch.equal(bundle.objective.initial(), trained["model"])
        assert bundle.about.adapt.model_dump() == {
            "steps": 2,
            "lr": 0.1,
            "lr_scale": None,  # no validation samples to choose one on
            "batch_size": 6,
            "optimiser": "sgd",
        }
        measured = bundle.about.measured
        assert measured["split_sha256"] == run.splits[0].sha256
        scores = [s.score[2] for s in run.methods[method][0].scores if s.seen]
        assert measured["groups"]["seen"]["personal"] == pytest.approx(np.mean(scores))
        assert f"{np.mean(scores):.3f}" in bundle.card


def test_another_seed_can_be_bundled(run, tmp_path):
    made = nufed.make_bundle(run, "fedavg", 1)
    trained = load_file(run.path / "methods" / "fedavg" / "seed-1" / "model.safetensors")
    assert torch.equal(made.objective.initial(), trained["model"])
    for method, seed, words in (
        ("no", 0, "must be one of fedavg, gmeta-fo"),
        ("fedavg", 7, "must be one of 0, 1"),
    ):
        with pytest.raises(InputError, match=words):
            nufed.make_bundle(run, method, seed)


@pytest.mark.parametrize("steps", [0, 3, "auto"])
def test_adapting_through_a_file_gives_the_bits_of_adapting_in_memory(run, some, tmp_path, steps):
    made = nufed.make_bundle(run, "gmeta-fo")
    loaded = load_bundle(made.save(tmp_path / "b.nufed"))
    here, there = (bundle.adapt(*some, steps=steps) for bundle in (made, loaded))
    assert same(weights(here.module), weights(there.module)) and here.report == there.report
    kept = load_adapted(there.save(tmp_path / "mine.safetensors"))
    assert same(weights(here.module), weights(kept.module)) and kept.report == here.report
    assert kept.predict(some[0]) == here.predict(some[0])
    assert loaded.card == made.card and loaded.about == made.about


def test_adapting_is_plain_steps_on_the_training_data_in_its_own_units(run, some):
    """Against a PyTorch loop with the same batches."""
    bundle = nufed.make_bundle(run, "gmeta-fo")
    from nufed.lab.bundle.adapting import fine_tuned

    samples = bundle.about.samples(*some)
    *_, w = fine_tuned(bundle, samples, range(40), 2, seed=3)
    adapted = bundle.adapt(*some, seed=3)
    assert torch.equal(Objective(adapted.module[1]).initial(), w)
    outputs = adapted.module(some[0])
    assert torch.equal(outputs, bundle.objective.predict(w, some[0] / 16))
    assert adapted.predict(some[0])[0].answer == str(int(outputs[0].argmax()))


def test_the_report_is_measured_on_held_out_samples(some):
    """On random labels adapting does not help; on real ones it does."""
    x, y = data(200)
    bundle = small()
    rng = np.random.default_rng(1)
    noise = bundle.adapt(x, rng.permutation(y), steps=60).report
    real = bundle.adapt(x, y, steps=60).report
    assert real.verdict == "helped" and real.after.accuracy > real.before.accuracy + 0.1
    assert noise.after.accuracy < 0.5 and noise.after.loss > real.after.loss + 0.2
    assert real.samples == 200 and len(real.curve) == 61 and real.after == real.curve[60]
    assert real.majority == pytest.approx(0.36, abs=0.1)


def test_auto_leaves_a_model_unchanged_that_fine_tuning_only_harms():
    x, y = data(120)
    trained = small().adapt(x, y, steps=400, seed=1).module[1]
    good = small().about.adapt
    bundle = Bundle.of(
        trained, input_shape=(5,), adapt_lr=8.0, classes=("a", "b", "c"), batch_size=good.batch_size
    )
    fixed, auto = bundle.adapt(x, y, steps=3), bundle.adapt(x, y, steps="auto")
    assert fixed.report.verdict == "harmed"
    assert auto.report.steps == 0 and same(weights(auto.module[1]), weights(trained))
    assert "left unchanged" in " ".join(auto.report.words())
    helped = small().adapt(x, y, steps="auto", max_steps=40).report
    assert helped.steps > 5 and helped.verdict == "helped"


def test_regression_and_losses_of_ones_own(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5)).astype(np.float32)
    y = x @ rng.normal(size=(5, 2)).astype(np.float32)

    def loss(outputs, targets):
        return (outputs - targets).abs().mean()

    module = nn.Linear(5, 2)
    for given in ("auto", loss):
        bundle = Bundle.of(module, input_shape=(5,), adapt_lr=0.1, batch_size=20, loss=given)
        path = bundle.save(tmp_path / f"{given == 'auto'}.nufed")
        with pytest.raises(InputError, match="pass module="):
            load_bundle(path)
        if given != "auto":
            with pytest.raises(InputError, match="pass loss="):
                load_bundle(path, module=module)
        loaded = load_bundle(path, module=nn.Linear(5, 2), loss=None if given == "auto" else loss)
        adapted = loaded.adapt(x, y, steps=30)
        assert adapted.report.helped and adapted.report.after.accuracy is None
        kept = adapted.save(tmp_path / "mine.safetensors")
        prediction = load_adapted(kept, module=nn.Linear(5, 2)).predict(x[:1])[0]
        assert prediction == Prediction(
            pytest.approx(adapted.module(torch.tensor(x[:1]))[0].tolist()), None
        )


def test_tied_weights_and_a_checkpoint_of_ones_own(tmp_path):
    torch.manual_seed(3)
    module = Tied()
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.head.bias += 1
    save_file({k: v.clone() for k, v in other.state_dict().items()}, tmp_path / "mine.safetensors")
    bundle = Bundle.of(
        module,
        weights=tmp_path / "mine.safetensors",
        input_shape=(5,),
        adapt_lr=0.1,
        classes=("a", "b", "c"),
    )
    loaded = load_bundle(bundle.save(tmp_path / "tied.nufed"), module=module)
    assert same(weights(loaded.module), weights(other))
    assert loaded.objective.size == Objective(module).size
    loaded.adapt(*data())


class Strided(nn.Module):
    """Its weight is a transposed view and its buffer an expanded one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 640).reshape(10, 64).t())
        self.register_buffer("offset", torch.ones(1).expand(10))

    def forward(self, x):
        return x.flatten(1) @ self.weight + self.offset


def test_tensors_that_are_not_contiguous_are_trained_bundled_and_adapted(tmp_path, some):
    config = {
        "rounds": 1,
        "data": {"agents": 4, "samples_per_agent": 20},
        "method": {"adapt_steps": 1, "batch_size": 5},
        "methods": {"fo": {"algorithm": "gmeta", "curvature": "first_order"}},
        "baselines": [],
    }
    run = nufed.run(config, ["workers=1"], model=Strided, out=tmp_path / "run", figures=False)
    trained = load_file(run.path / "methods/fo/seed-0/model.safetensors")["model"]
    bundle = load_bundle(run.path / "bundles/fo.nufed", module=Strided())
    assert torch.equal(Objective(bundle.module).initial(), trained)
    adapted = bundle.adapt(*some, steps=1)
    adapted.save(tmp_path / "mine.safetensors")
    again = load_adapted(tmp_path / "mine.safetensors", module=Strided())
    assert again.predict(some[0]) == adapted.predict(some[0])


def test_a_step_size_per_parameter(tmp_path):
    x, y = data()
    names = [name for name, _ in small().module.named_parameters()]
    frozen = dict.fromkeys(names, 0.0) | {"2.bias": 0.5}
    bundle = small(adapt_lr=frozen)
    adapted = bundle.adapt(x, y, steps=2).module[1]
    moved = {
        n
        for n, p in adapted.named_parameters()
        if not torch.equal(p, bundle.module.get_parameter(n))
    }
    assert moved == {"2.bias"}
    with pytest.raises(
        InputError, match=r"must have one for every trainable parameter, 0.bias, 0.weight"
    ):
        small(adapt_lr={"2.bias": 0.1})


def test_learned_step_sizes_travel_in_the_bundle(tmp_path):
    """Adapting the bundle gives the scores of the run's evaluation with learned step sizes."""
    learning = {"gmeta": {"rates_lr": 0.1}}
    run = nufed.run({**CONFIG, "seeds": [0], "methods": learning}, out=tmp_path / "run")
    bundle = load_bundle(run.path / "bundles" / "gmeta.nufed")
    server = load_file(run.path / "methods" / "gmeta" / "seed-0" / "model.safetensors")
    assert len(set(bundle.about.adapt.lr.values())) == 4  # each tensor learned its own
    algorithm = run.config.algorithms()["gmeta"]
    assert torch.equal(bundle.rate(), algorithm.rate(bundle.objective, server))
    assert "one per parameter, learned" in bundle.card
    bundle.adapt(digits().inputs[:20], digits().targets[:20])


@pytest.mark.parametrize("rates", ["coordinate", "step"])
def test_step_sizes_by_coordinate_or_step_are_stored_beside_the_weights(rates, tmp_path):
    learning = {"gmeta": {"rates_lr": 0.1, "rates": rates, "adapt_steps": 2}}
    config = {**CONFIG, "seeds": [0], "eval_lr": "as_trained", "methods": learning}
    run = nufed.run(config, out=tmp_path / "run")
    bundle = load_bundle(run.path / "bundles" / "gmeta.nufed")
    server = load_file(run.path / "methods" / "gmeta" / "seed-0" / "model.safetensors")
    algorithm = run.config.algorithms()["gmeta"]
    assert torch.equal(bundle.rate(), algorithm.rate(bundle.objective, server))
    again = load_bundle(bundle.save(tmp_path / "again.nufed"))
    assert torch.equal(again.rate(), bundle.rate()) and "per coordinate or step" in again.card


@pytest.mark.parametrize("rows", [(), (2,)])
def test_adapting_takes_the_stored_step_sizes(rows, tmp_path):
    rates = torch.rand(*rows, 39, generator=torch.Generator().manual_seed(0))
    bundle = load_bundle(small(adapt_lr=rates).save(tmp_path / "b.nufed"), module=small().module)
    x, y = data(8)  # a batch holds all of them
    adapted = bundle.adapt(x, y, steps=3, anyway=True).module[1]
    w = bundle.objective.initial()
    for step in range(3):
        rate = rates[min(step, 1)] if rows else rates
        w = w - rate * bundle.objective.grad(w, (torch.tensor(x), torch.tensor(y)))
    found = torch.cat([p.flatten() for p in adapted.parameters()])
    torch.testing.assert_close(found, w)
    one = bundle.adapt(x, y, steps=3, lr=0.3, anyway=True).module[1]  # replaces the stored ones
    other = small(adapt_lr=0.3).adapt(x, y, steps=3, anyway=True).module[1]
    assert same(weights(one), weights(other))


@pytest.mark.parametrize(
    "rates", [torch.ones(3), torch.full((39,), -1.0), torch.full((2, 39), float("nan"))]
)
def test_stored_step_sizes_that_are_not_the_models_are_refused(rates):
    with pytest.raises(InputError, match="step sizes must be"):
        small(adapt_lr=rates)


def test_an_adapted_model_can_be_exported():
    x, y = data(50)
    module = small().adapt(x, y).module
    inputs = torch.tensor(x)
    rows = torch.export.Dim("rows", min=2, max=1000)
    program = torch.export.export(module, (inputs,), dynamic_shapes=({0: rows},))
    assert torch.allclose(program.module()(inputs[:7]), module(inputs[:7]), atol=1e-5)


def test_code_is_imported_only_for_those_who_trust(tmp_path, monkeypatch):
    (tmp_path / "their_model.py").write_text(
        "from pathlib import Path\nfrom torch import nn\nPath('was-run').touch()\n"
        "def make(width):\n    return nn.Linear(5, width)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    bundle = Bundle.of(
        nn.Linear(5, 3),
        build="their_model:make",
        args={"width": 3},
        input_shape=(5,),
        adapt_lr=0.1,
        classes=("a", "b", "c"),
    )
    path = bundle.save(tmp_path / "b.nufed")
    with pytest.raises(InputError, match=r"their_model:make, code that would be imported"):
        load_bundle(path)
    assert not (tmp_path / "was-run").exists()
    trusted = load_bundle(path, trust=True)
    assert (tmp_path / "was-run").exists() and same(weights(trusted.module), weights(bundle.module))
    kept = trusted.adapt(*data()).save(tmp_path / "mine.safetensors")
    with pytest.raises(InputError, match="would be imported"):
        load_adapted(kept)
    load_adapted(kept, trust=True)


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        (np.zeros((4, 6)), [0, 1, 2, 0], "6 numbers, and this model takes 5"),
        (np.zeros((0, 5)), [], "the data is empty"),
        (np.zeros((1, 5)), [0], "there is 1 sample"),
        (np.full((3, 5), np.nan), [0, 1, 2], r"sample 0 .* holds NaN"),
        (np.zeros((3, 5)), [0, 1], "3 inputs and 2 targets"),
        (np.zeros((3, 5)), [0, 1, 3], "class numbers in 0 … 2"),
        (np.zeros((3, 5)), [0.5, 1, 2], "class numbers in 0 … 2"),
        (
            np.zeros((3, 5)),
            ["a", "b", "d"],
            "unknown label 'd' of sample 2 .*: the classes are a, b, c",
        ),
        ([["x"] * 5] * 3, [0, 1, 2], "can't be used as data"),
    ],
)
def test_invalid_data_is_refused_in_one_sentence(inputs, targets, words):
    with pytest.raises(InputError, match=words):
        small().adapt(inputs, targets)


def test_bytes_are_given_as_bytes(some):
    bundle = small(input_dtype="uint8", scale=1 / 16)
    x = np.arange(50).reshape(10, 5) % 17
    y = np.arange(10) % 3
    assert same(
        weights(bundle.adapt(x, y).module), weights(bundle.adapt(x.astype(float), y).module)
    )
    for wrong in (x / 16, x * 16, -x):
        with pytest.raises(InputError, match=r"integers in 0 … 255.*which it scales itself"):
            bundle.adapt(wrong, y)


@pytest.mark.parametrize("steps", [-1, 1.5, "many", True])
def test_bad_steps_are_refused(steps):
    with pytest.raises(InputError, match="steps = "):
        small().adapt(*data(), steps=steps)


def test_class_names_and_numbers_mean_the_same():
    x, y = data()
    names = np.array(["a", "b", "c"])[y]
    assert same(weights(small().adapt(x, y).module), weights(small().adapt(x, names).module))


def test_the_report_is_valid_json(tmp_path):
    adapted = small().adapt(*data())
    adapted.save(tmp_path / "m.safetensors")
    from safetensors import safe_open

    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        about = json.loads(file.metadata()["about"])
        assert about["adapted"]["classes"] == ["a", "b", "c"]
