"""Divergence is reported with the agent, the step and the likely cause."""

import sys

import pytest
import torch
from torch import nn

from nufed import Exact, FirstOrder, GMeta, HessianFree, Objective
from nufed.algorithms import Scaffold
from nufed.errors import TrainingError
from nufed.simulation import DirectEngine, train
from support import agent_context, federation, mlp


def cause(algorithm, module=None, model=None):
    objective = Objective(module or mlp(torch.float32))
    w = objective.initial() if model is None else model
    own = agent_context(objective, federation().batches(2, 0, "train", 1))
    return algorithm.checks.diagnose(own, {"model": w}, {})


def quartic(outputs, targets):
    """A loss whose curvature grows with the outputs, so that large steps explode."""
    return (outputs**4).mean()


def test_healthy_work_has_no_cause():
    assert (
        cause(
            GMeta(
                adapt_steps=2,
                adapt_lr=0.1,
                meta_lr=0.1,
                local_steps=2,
                batch_size=6,
                curvature=Exact(),
            )
        )
        is None
    )


def test_a_model_that_is_not_finite_is_the_cause():
    engine = DirectEngine(Objective(mlp(torch.float32)), federation(), seed=0)
    model = torch.full((engine.objective.size,), float("inf"))
    with pytest.raises(TrainingError, match="the model it was sent is not finite"):
        list(
            train(
                GMeta(adapt_steps=1, adapt_lr=0.1, meta_lr=0.1, local_steps=2, batch_size=6),
                engine,
                model,
                rounds=1,
                participation=0.5,
            )
        )


def test_an_algorithm_without_a_diagnosis_says_so():
    objective = Objective(nn.Linear(5, 3), quartic)
    engine = DirectEngine(objective, federation(), seed=0)
    with pytest.raises(TrainingError, match="Scaffold can't say why; lower its step sizes"):
        start = objective.initial()
        list(
            train(Scaffold(meta_lr=30.0, batch_size=6), engine, start, rounds=9, participation=0.5)
        )


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (
            GMeta(
                adapt_steps=6,
                adapt_lr=30.0,
                meta_lr=0.0,
                local_steps=2,
                batch_size=6,
                curvature=FirstOrder(),
            ),
            r"fine-tuning step \d .*adapt_lr = 30 above 2/L",
        ),
        (
            GMeta(
                adapt_steps=6,
                adapt_lr=30.0,
                meta_lr=0.0,
                local_steps=2,
                batch_size=6,
                curvature=FirstOrder(),
                rates_lr=1e-9,
            ),
            r"fine-tuning step \d .*learned adapt_lr = 30 above 2/L",
        ),
        (
            GMeta(
                adapt_steps=0,
                adapt_lr=0.1,
                meta_lr=30.0,
                local_steps=9,
                batch_size=6,
                curvature=FirstOrder(),
            ),
            r"in local update \d.*meta_lr = 30 above 2/L",
        ),
    ],
)
def test_step_sizes_above_two_over_l_are_named(algorithm, words):
    objective = Objective(nn.Linear(5, 3), quartic)
    engine = DirectEngine(objective, federation(), seed=0)
    where = r"(?s)agent \d, round 1: 'model' is not finite: .*"
    with pytest.raises(TrainingError, match=where + words):
        list(train(algorithm, engine, objective.initial(), rounds=3, participation=0.5))


def test_a_fixed_step_of_differences_is_named(monkeypatch):
    def spoiled(objective, w, *_, **__):
        return torch.full_like(w, float("nan"))

    monkeypatch.setattr(sys.modules[GMeta.__module__], "meta_gradient", spoiled)
    found = cause(
        GMeta(
            adapt_steps=3,
            adapt_lr=0.5,
            meta_lr=0.1,
            local_steps=1,
            batch_size=6,
            curvature=HessianFree(1e-7),
        )
    )
    assert found.startswith("in local update 1, the meta-gradient is not finite: fd_step = 1e-07")
    assert "2/L" not in cause(
        GMeta(
            adapt_steps=3,
            adapt_lr=0.01,
            meta_lr=0.01,
            local_steps=1,
            batch_size=6,
            curvature=HessianFree(),
        )
    )
