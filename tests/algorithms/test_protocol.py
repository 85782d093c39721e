"""What others may ask an algorithm, instead of its class or the names of its settings."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import nufed
from nufed import GMeta, InputError, Objective
from nufed.algorithms import (
    AgentContext,
    FedAvg,
    FedL2P,
    FedRoD,
    KNNPer,
    LocalTraining,
    Personal,
    Scaffold,
)
from nufed.algorithms.aggregation import Mean, TrimmedMean
from nufed.algorithms.gmeta import local_sgd
from nufed.algorithms.local_optimizer import SGD
from nufed.evaluate.null_baselines import local_training
from nufed.flower.app.plan import Plan
from nufed.flower.app.privacy import Privacy
from nufed.lab.config import load_config
from nufed.settings import setting
from support import federation, mlp


@dataclass(frozen=True)
class Own(LocalTraining):
    """Names none of its settings as nufed's do."""

    inner: int = setting(3, "steps the model is trained for", least=1)
    newcomer: ClassVar[str] = "uses the global model"

    @property
    def trained_for(self):
        return self.inner

    @property
    def fixed_rate(self):
        return None

    @property
    def averages_uniformly(self):
        return False

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
    assert GMeta(adapt_lr=0.2).fixed_rate == GMeta(adapt_lr=0.2).initial_rate == 0.2
    learned, vector = GMeta(adapt_lr=0.2, rates_lr=0.1), GMeta(adapt_lr=torch.ones(3))
    assert (learned.fixed_rate, learned.initial_rate) == (None, 0.2)
    assert (vector.fixed_rate, vector.initial_rate) == (None, None)
    assert (FedL2P().fixed_rate, Own().fixed_rate) == (None, None)


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
    assert GMeta().averages_uniformly and Scaffold().averages_uniformly
    objective = Objective(mlp(torch.float32))
    for algorithm in (Own(), GMeta(aggregation=TrimmedMean()), GMeta(aggregation=Mean("samples"))):
        with pytest.raises(InputError, match="an aggregation other than the uniform mean"):
            Plan(algorithm, objective, agents=3, rounds=1, privacy=Privacy(clip=1.0, noise=1.0))


def test_who_only_fine_tunes_and_who_predicts_plainly():
    assert GMeta().only_fine_tunes and GMeta().predicts_plainly
    assert not Own().only_fine_tunes and Own().predicts_plainly
    for algorithm in (KNNPer(), FedRoD()):
        assert not algorithm.only_fine_tunes and not algorithm.predicts_plainly
    assert Scaffold.keeps_states() and not GMeta.keeps_states()


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
