"""What others may ask an algorithm, instead of its class or the names of its settings."""

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import nufed
from nufed import GMeta, InputError, Objective
from nufed.algorithms import (
    AgentContext,
    FedAMP,
    FedAvg,
    FedDBE,
    FedDyn,
    FedL2P,
    FedNova,
    FedProto,
    FedRoD,
    KNNPer,
    LocalTraining,
    Personal,
    Scaffold,
)
from nufed.algorithms.aggregation import Mean, TrimmedMean
from nufed.algorithms.gmeta import local_sgd
from nufed.algorithms.local_optimizer import SGD
from nufed.algorithms.protocol import REMOVED, Adaptation, Notes, defines
from nufed.evaluate.null_baselines import local_training
from nufed.flower.app.plan import Plan
from nufed.flower.app.privacy import Privacy
from nufed.lab.config import load_config
from nufed.server import initial_server, sums_suffice
from nufed.settings import setting
from support import context, federation, mlp


@dataclass(frozen=True)
class Own(LocalTraining):
    """Names none of its settings as nufed's do."""

    inner: int = setting(3, "steps the model is trained for", least=1)
    notes: ClassVar[Notes] = Notes(newcomer="uses the global model")

    @property
    def adaptation(self):
        return Adaptation(self.inner, self.adapt_lr, learned=True)

    def server_update(self, context, server, updates):
        return super().server_update(context, server, [*updates])

    def agent_update(self, context, received, state):
        raise NotImplementedError

    def personal_model(self, context, received, state):
        return Personal({"model": received["model"]})


def test_results_are_shown_after_the_steps_that_a_model_is_trained_for():
    own = {"algorithm": f"{__name__}:Own"}
    assert (
        load_config(
            {"methods": {"a": own, "b": {"algorithm": "gmeta", "adapt_steps": 2}}}
        ).steps_shown
        == 3
    )
    assert (
        load_config(
            {"methods": {"a": own, "b": {"algorithm": "gmeta", "adapt_steps": 5}}}
        ).steps_shown
        == 5
    )


def test_step_sizes_of_fine_tuning():
    assert GMeta(adapt_steps=3, adapt_lr=0.2).adaptation == Adaptation(3, 0.2)
    assert Adaptation(3, 0.2).fixed_lr == 0.2
    learned, vector = GMeta(adapt_lr=0.2, rates_lr=0.1), GMeta(adapt_lr=torch.ones(3))
    assert (learned.adaptation.fixed_lr, learned.adaptation.lr) == (None, 0.2)
    assert (vector.adaptation.fixed_lr, vector.adaptation.lr) == (None, None)
    assert (FedL2P().adaptation.fixed_lr, Own().adaptation.fixed_lr) == (None, None)
    assert (FedAvg().adaptation.steps, Scaffold().adaptation.steps) == (0, 0)


def test_the_results_table_asks_for_step_sizes(tmp_path):
    config = {
        "rounds": 1,
        "workers": 1,
        "tune_local": True,
        "data": {"agents": 3, "samples_per_agent": 40, "validation": 0.2},
        "method": {"batch_size": 5, "meta_lr": 0.3, "adapt_lr": 0.2},
        "methods": {
            "learned": {"algorithm": "gmeta", "rates_lr": 0.1},
            "fixed": {"algorithm": "gmeta"},
        },
    }
    run = nufed.run(config, out=tmp_path / "run", figures=False)
    shown = {row.name: row.adapt_lr for row in run.rows()}
    scales = {line.name: line.scales() for line in run.lines()}
    assert shown["learned"] == (None,) and scales["learned"]
    for name, size in {"fixed": 0.2, "untrained": 0.2, "local": 0.3}.items():
        assert shown[name] == (scales[name][0] * size,)


def test_epsilon_needs_the_uniform_mean():
    objective = Objective(mlp(torch.float32))
    for algorithm in (GMeta(), Scaffold(), FedDyn(), FedNova(), FedDBE(), FedProto()):
        server = initial_server(algorithm, objective, objective.initial())
        assert sums_suffice(algorithm, context(), server)
    for algorithm in (Own(), GMeta(aggregation=TrimmedMean()), GMeta(aggregation=Mean("samples"))):
        with pytest.raises(InputError, match="an aggregation other than the uniform mean"):
            Plan(algorithm, objective, agents=3, rounds=1, privacy=Privacy(clip=1.0, noise=1.0))


def test_who_only_fine_tunes_and_who_predicts_plainly():
    assert not defines(GMeta(), "personal_model", "fine_tune", "predict")
    assert defines(Own(), "personal_model", "fine_tune") and not defines(Own(), "predict")
    for algorithm in (KNNPer(), FedRoD()):
        assert defines(algorithm, "personal_model", "fine_tune") and defines(algorithm, "predict")
    assert defines(FedAMP, "downlink") and not defines(GMeta, "downlink")


@pytest.mark.parametrize("name", REMOVED)
def test_a_member_of_an_older_protocol_is_refused_with_what_replaces_it(name):
    told = re.escape(f"Old defines {name!r}, which is not part of")
    for body in ({name: lambda self: 1}, {name: 1}, {"__annotations__": {name: int}}):
        with pytest.raises(InputError, match=f"{told}.*{re.escape(REMOVED[name])}"):
            type("Old", (GMeta,), body)
    mixin = type("Mixin", (), {name: property(lambda self: 1)})
    with pytest.raises(InputError, match=told):
        type("Old", (mixin, LocalTraining), {})


def test_local_sgd_has_the_settings_that_are_shared():
    like = Own(meta_lr=0.3, local_steps=2, batch_size=7, adapt_lr=0.4)
    local = local_sgd(like)
    assert (local.meta_lr, local.local_steps, local.batch_size, local.adapt_lr) == (0.3, 2, 7, 0.4)
    assert local.adapt_steps == 0


def test_local_training_takes_the_epochs_and_the_optimiser_of_all_rounds():
    """Against torch's own optimiser, for as many epochs as three rounds of the method have."""
    sgd = SGD(momentum=0.5, weight_decay=0.1)
    like = FedAvg(meta_lr=0.1, local_epochs=2, batch_size=7, optimizer=sgd)
    local, objective = local_training(like, rounds=3), Objective(mlp())
    batches = federation().batches(1, seed=0, use="train", round=1)
    own = AgentContext(1, 6, 6, objective, batches, batches.samples)
    found = local.agent_update(own, {"model": objective.initial()}, {})
    module = objective.module(objective.initial())
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.5, weight_decay=0.1)
    for batch in (batch for epoch in range(6) for batch in batches.epoch("outer", 7, epoch)):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(batch.inputs.double()), batch.targets)
        loss.backward()
        optimizer.step()
    right = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert torch.allclose(found.vectors["model"], right, rtol=0, atol=1e-12)
    assert found.cost.gradients == 6 * 3
