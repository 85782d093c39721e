"""Divergence is reported with the agent, the step and the likely cause."""

import pytest
import torch
from torch import nn

from nufed import Exact, FirstOrder, GMeta, HessianFree, Objective
from nufed.errors import TrainingError
from nufed.simulation import DirectEngine, train
from nufed.simulation.diagnose import diagnose
from support import federation, mlp


def cause(algorithm, module=None, model=None):
    objective = Objective(module or mlp(torch.float32))
    w = objective.initial() if model is None else model
    return diagnose(algorithm, objective, federation(), 2, seed=0, round=1, server={"model": w})


def quartic(outputs, targets):
    """A loss whose curvature grows with the outputs, so that large steps explode."""
    return (outputs**4).mean()


def test_healthy_work_has_no_cause():
    assert cause(GMeta(2, 0.1, 0.1, 2, 6, Exact())) is None


def test_a_model_that_is_not_finite_is_the_cause():
    objective = Objective(mlp(torch.float32))
    model = torch.full((objective.size,), float("inf"))
    assert cause(GMeta(1, 0.1, 0.1, 2, 6), model=model) == "the model it was sent is not finite"


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (
            GMeta(6, 30.0, 0.0, 2, 6, FirstOrder()),
            r"fine-tuning step \d .*adapt_lr = 30 above 2/L",
        ),
        (
            GMeta(6, 30.0, 0.0, 2, 6, FirstOrder(), rates_lr=1e-9),
            r"fine-tuning step \d .*learned adapt_lr = 30 above 2/L",
        ),
        (GMeta(0, 0.1, 30.0, 9, 6, FirstOrder()), r"in local update \d.*meta_lr = 30 above 2/L"),
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

    monkeypatch.setattr("nufed.simulation.diagnose.meta_gradient", spoiled)
    found = cause(GMeta(3, 0.5, 0.1, 1, 6, HessianFree(1e-7)))
    assert found.startswith("in local update 1, the meta-gradient is not finite: fd_step = 1e-07")
    assert "2/L" not in cause(GMeta(3, 0.01, 0.01, 1, 6, HessianFree()))
