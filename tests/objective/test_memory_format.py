"""``memory_format = "channels_last"``: the layout of images and kernels in gradients."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import nufed
from conformance.cases import CASES
from flower.app.in_memory import agents_data, federate, federation_of, plan_of
from nufed import InputError, Objective, gmeta
from nufed.lab.config import load_config
from nufed.lab.experiment import training
from nufed.lab.runs.finished_run import WORTH_SETTING
from nufed.lab.runs.records import TimingLine
from nufed.simulation import DirectEngine, Engines, WorkerEngine, train
from support import batches, federation, relative_error, same, without_report

GMETA = gmeta(adapt_steps=2, adapt_lr=0.1, meta_lr=0.1, local_steps=2, batch_size=6)

CONFIG = {
    "rounds": 2,
    "seeds": [0],
    "baselines": [],
    "data": {"source": "digits", "agents": 4, "samples_per_agent": 30},
    "model": {"name": "cnn_groupnorm", "args": {"channels": [4, 4]}},
    "methods": {"m": {"algorithm": "fedavg", "meta_lr": 0.1, "batch_size": 8}},
}


class Watched(nn.Module):
    """Notes in which layout it gets images and kernels."""

    def __init__(self, seen):
        super().__init__()
        self.kernel = nn.Parameter(
            torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
        )
        self.seen = seen

    def forward(self, x):
        images = x if x.ndim == 4 else x.view(len(x), 1, 1, 5).expand(-1, 3, 2, -1)
        self.seen.append(self.kernel.is_contiguous(memory_format=torch.channels_last))
        y = torch.tanh(nn.functional.conv2d(images, self.kernel))
        assert y.is_contiguous(memory_format=torch.channels_last) == self.seen[-1]
        return y.mean(dim=3).flatten(1)


def convolutional(layers=()):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)),
        nn.Conv2d(1, 6, (1, 3), padding=(0, 1)),
        nn.GroupNorm(2, 6),
        nn.Softplus(),
        nn.Conv2d(6, 4, (1, 3), padding=(0, 1)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(20, 3),
        *layers,
    )


def pair(module):
    return Objective(module, memory_format="channels_last"), Objective(module)


def test_gradients_and_outputs_use_it_and_products_do_not():
    seen = []
    last, _ = pair(Watched([]))
    last._module.seen = seen
    w, (batch,) = last.initial(), batches(1, dtype=torch.float32)
    for compute, right in (
        (lambda: last.predict(w, batch.inputs), [True]),
        (lambda: last.value(w, batch), [True]),
        (lambda: last.grad(w, batch), [True]),
        (lambda: last.hvp(w, batch, w), [False]),
    ):
        seen.clear()
        compute()
        assert seen == right


@pytest.mark.parametrize("make", [convolutional, lambda: Watched([])])
def test_derivatives_agree_with_the_usual_layout(make):
    last, plain = pair(make().double())
    w, (batch,) = plain.initial(), batches(1)
    for compute in (
        lambda o: o.predict(w, batch.inputs),
        lambda o: o.grad(w, batch),
        lambda o: o.grad(w, batch, o.part("head")),
        lambda o: o.hvp(w, batch, torch.linspace(-1, 1, len(w), dtype=w.dtype)),
        lambda o: o.double.grad(w, batch),
    ):
        assert relative_error(compute(last), compute(plain)) < 1e-13


def test_only_tensors_of_images_change_their_layout():
    shapes = {"a": (2, 3, 4, 5), "b": (2, 3, 4, 5, 6), "c": (2, 3, 4), "d": ()}
    moved = {n: nufed.objective.modules.channels_last(torch.rand(s)) for n, s in shapes.items()}
    assert moved["a"].stride()[1] == moved["b"].stride()[1] == 1
    assert moved["c"].is_contiguous() and moved["d"].is_contiguous()


@pytest.mark.parametrize("case", ["fedavg", "gmeta-exact", "gmeta-hf", "ditto"])
def test_workers_and_flower_give_the_bits_of_direct(case):
    algorithm = CASES[case]
    plan = plan_of(algorithm, agents=5, rounds=2, participation=0.5)
    last, plain = pair(convolutional())
    engines = [
        DirectEngine(o, federation_of(agents_data(5), plan.seed, 0), plan.seed)
        for o in (last, plain)
    ]
    settings = {"rounds": 2, "participation": 0.5}
    models = []
    with WorkerEngine(engines[0], 2) as workers:
        for engine in (engines[0], workers, engines[1]):
            *_, end = train(algorithm, engine, last.initial(), **settings)
            models.append(end.server)
    rounds, _, _ = federate(replace(plan, objective=last), agents_data(5))
    assert same(models[0], models[1]) and same(models[0], rounds[-1].server)
    assert not same(models[0], models[2])
    for name, vector in models[0].items():
        assert relative_error(vector, models[2][name]) < 1e-2


def test_stacks_are_refused():
    last, plain = pair(convolutional())
    assert Engines(plain, federation(), 5).obstacle("batched", GMETA) is None
    assert "a stack of vectors can't" in Engines(last, federation(), 5).obstacle("batched", GMETA)
    assert Engines(last, federation(), 5).choose(GMETA, "auto") == "direct"
    assert (
        pair(convolutional())[0].variant(loss=nn.functional.mse_loss)._memory_format
        == "channels_last"
    )


def test_it_is_refused_where_it_has_no_effect():
    with pytest.raises(InputError, match="must be one of contiguous, channels_last"):
        Objective(convolutional(), memory_format="channels_first")
    config = CONFIG | {"memory_format": "channels_last", "model": {"name": "fcnn"}}
    with pytest.raises(InputError, match='memory_format = "channels_last": the model has no conv'):
        nufed.run(config)
    assert load_config({"memory_format": "contiguous"}).fingerprint == load_config({}).fingerprint


def test_a_run_records_it_and_reports_say_where_it_would_help(tmp_path, monkeypatch):
    runs = {}
    for layout in ("contiguous", "channels_last"):
        with without_report():
            config = CONFIG | {"memory_format": layout}
            runs[layout] = nufed.run(config, out=tmp_path / layout, figures=None)
    text = (tmp_path / "channels_last" / "config.toml").read_text("utf-8")
    assert 'memory_format = "channels_last"' in text
    (tried,) = runs["contiguous"].timing
    assert tried.channels_last > 0 and tried.bfloat16 > 0 and tried.channels_last_bfloat16 > 0
    assert [line.channels_last for line in runs["channels_last"].timing] == [None]

    def notes(**gains):
        line = TimingLine(method="m", seed=0, seconds=1, **gains)
        return replace(runs["contiguous"], timing=[line]).speed_notes()

    (note,) = notes(channels_last=WORTH_SETTING)
    assert 'memory_format = "channels_last" would make a gradient 1.10 × as fast' in note
    assert notes(channels_last=WORTH_SETTING - 0.01, bfloat16=1.0) == []
    (note,) = notes(channels_last=0.9, bfloat16=1.5, channels_last_bfloat16=1.0)
    assert 'precision = "bfloat16" would make a gradient 1.50 × as fast' in note
    exact, mixed = notes(channels_last=1.2, bfloat16=1.2, channels_last_bfloat16=1.7)
    both = 'precision = "bfloat16" with memory_format = "channels_last" would make a gradient 1.70'
    assert "the same results" in exact and both in mixed
    (note,) = notes(channels_last=1.2, channels_last_bfloat16=1.3)  # little more than the layout
    assert "bfloat16" not in note


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bfloat16"},
        {"methods": {"hf": {"algorithm": "gmeta", "curvature": "hessian_free", "batch_size": 8}}},
    ],
)
def test_mixed_precision_is_tried_where_it_can_be_set(settings, tmp_path):
    with without_report():
        run = nufed.run(CONFIG | settings, out=tmp_path / "run", figures=None)
    (line,) = run.timing
    assert line.channels_last > 0 and line.bfloat16 is None is line.channels_last_bfloat16


def test_models_without_convolutions_are_not_tried(tmp_path):
    with without_report():
        run = nufed.run(CONFIG | {"model": {"name": "fcnn"}}, out=tmp_path / "run", figures=None)
    assert [line.channels_last for line in run.timing] == [None]
    assert training.TRIAL_TURNS > 1
