"""``precision = "bfloat16"``: the module by autocast, vectors in float32."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import nufed
from nufed import Batch, InputError, Objective, fedavg, gmeta
from nufed.lab.config import load_config
from nufed.simulation import DirectEngine, Engines, WorkerEngine, train
from support import batches, federation, mlp, relative_error, same, without_report

CNN = (
    nn.Unflatten(1, (1, 1, 5)),
    nn.Conv2d(1, 8, (1, 3), padding=(0, 1)),
    nn.GroupNorm(2, 8),
    nn.Tanh(),
    nn.Flatten(),
    nn.Linear(40, 3),
)


def pair(kind):
    torch.manual_seed(0)
    module = mlp(torch.float32) if kind == "perceptron" else nn.Sequential(*CNN)
    return Objective(module, precision="bfloat16"), Objective(module)


@pytest.mark.parametrize("kind", ["perceptron", "cnn"])
def test_derivatives_are_near_those_in_float32_and_in_float32(kind):
    mixed, plain = pair(kind)
    w, (batch,) = plain.initial(), batches(1, dtype=torch.float32)
    v = torch.linspace(-1, 1, len(w))
    rows = torch.stack([w, w + 0.1])
    two = Batch(torch.stack([batch.inputs] * 2), torch.stack([batch.targets] * 2))
    for compute in (
        lambda o: o.predict(w, batch.inputs),
        lambda o: o.value(w, batch).reshape(1),
        lambda o: o.grad(w, batch),
        lambda o: o.hvp(w, batch, v),
        lambda o: o.grad(rows, two),
        lambda o: o.hvp(rows, two, torch.stack([v, v])),
    ):
        found, right = compute(mixed), compute(plain)
        assert found.dtype == torch.float32
        assert 0 < relative_error(found, right) < 0.05
        assert torch.equal(compute(mixed), found)
    assert torch.equal(mixed.double.grad(w.double(), batch), plain.double.grad(w.double(), batch))


def test_small_steps_are_not_lost():
    """1000 steps that bfloat16 would each round off."""
    mixed, _ = pair("perceptron")
    w, (batch,) = mixed.initial(), batches(1, dtype=torch.float32)
    g, after = mixed.grad(w, batch), w
    for _ in range(1000):
        after = after - 1e-6 * g
    assert torch.equal(w.bfloat16(), (w - 1e-6 * g).bfloat16())
    assert relative_error(after - w, -1e-3 * g) < 0.1


def test_workers_give_the_same_bits():
    mixed, plain = pair("cnn")
    algorithm = gmeta(adapt_steps=2, adapt_lr=0.1, meta_lr=0.1, local_steps=2, batch_size=6)
    alone = DirectEngine(mixed, federation(), 5)
    models = []
    with WorkerEngine(alone, 2) as workers:
        for engine in (alone, workers, DirectEngine(plain, federation(), 5)):
            *_, last = train(algorithm, engine, mixed.initial(), rounds=2, participation=0.5)
            models.append(last.server)
    assert same(models[0], models[1]) and not same(models[0], models[2])


def test_it_is_refused_where_it_cannot_work():
    with pytest.raises(InputError, match="needs a module in float32"):
        Objective(mlp(), precision="bfloat16")
    with pytest.raises(InputError, match="must be one of float32, bfloat16"):
        Objective(mlp(), precision="float16")
    table = {"precision": "bfloat16"}
    with pytest.raises(InputError, match='dtype = "float64"'):
        load_config(table | {"dtype": "float64"})
    with pytest.raises(InputError, match="finite differences of method a drown"):
        load_config(table | {"methods": {"a": {"algorithm": "gmeta", "curvature": "hessian_free"}}})
    methods = {"b": {"algorithm": "fedavg"}, "c": {"algorithm": "gmeta"}}
    assert load_config(table | {"methods": methods}).precision == "bfloat16"


def test_the_default_changes_no_fingerprint():
    assert "precision" not in load_config({}).model_dump()
    assert load_config({"precision": "float32"}).fingerprint == load_config({}).fingerprint


def test_engines_that_stack_run_it():
    mixed, _ = pair("perceptron")
    assert Engines(mixed, federation(), 5).obstacle("batched", fedavg(batch_size=6)) is None


def test_a_run_computes_with_it_and_records_it(tmp_path):
    config = {
        "rounds": 3,
        "seeds": [0],
        "baselines": [],
        "workers": 1,
        "data": {"source": "digits", "agents": 6, "samples_per_agent": 40},
        "methods": {"m": {"algorithm": "fedavg", "meta_lr": 0.1, "batch_size": 8}},
    }
    models = []
    for precision in ("float32", "bfloat16"):
        with without_report():
            out = tmp_path / precision
            run = nufed.run(config | {"precision": precision}, out=out, figures=None)
        models.append(load_file(run.path / "methods" / "m" / "seed-0" / "model.safetensors"))
    assert 'precision = "bfloat16"' in (run.path / "config.toml").read_text()
    for plain, mixed in zip(*(model.values() for model in models), strict=True):
        assert mixed.dtype == torch.float32 and 0 < relative_error(mixed, plain) < 0.05
