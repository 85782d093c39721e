"""Every engine gives the direct engine's models and scores, up to rounding.

Differences are relative to how far training moved the model. The agents have 9 to 30 training
samples and batches of 12: batches share samples, and small agents have smaller batches.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nufed import Exact, Federation, FirstOrder, GMeta, HessianFree, Objective, Samples
from nufed.evaluate import Measure
from nufed.gram import first_layer
from nufed.models import fcnn, logistic
from nufed.runs.build import squared_error
from nufed.simulation import BatchedEngine, DirectEngine, GramEngine, train
from support import cnn, uneven_federation


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(5, 6)
        self.fc2 = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc2(F.softplus(self.fc1(x)))


class FirstLayerLast(nn.Module):
    """Other parameters stand before those of the first layer."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(6, 3)
        self.body = nn.Linear(5, 6)

    def forward(self, x):
        return self.head(self.gain * torch.tanh(self.body(x)))


MODULES = {
    "tanh": lambda: fcnn((5,), 3, hidden=(6, 4), activation="tanh"),
    "relu": lambda: fcnn((5,), 3, hidden=(6, 4)),
    "logistic": lambda: logistic((5,), 3),
    "logistic without bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 3, bias=False)),
    "linear": lambda: nn.Linear(5, 3),
    "custom": Custom,
    "first layer last": FirstLayerLast,
}
CURVATURES = {"fo": FirstOrder(), "exact": Exact(), "hf": HessianFree()}
METHODS = {
    "fedavg": GMeta(0, 0.2, 0.3, 2, 12, FirstOrder()),
    **{
        f"{how} {nu}": GMeta(nu, 0.2, 0.3, 2, 12, curvature)
        for how, curvature in CURVATURES.items()
        for nu in (1, 2, 3, 4)
    },
}
ROUNDING = 1e-9
# a difference of gradients over √ε keeps half the digits of float64: about 1e-8 of a product
OF_DIFFERENCES = 1e-6


def objective_of(module, dtype=torch.float64, loss=F.cross_entropy):
    return Objective(module().to(dtype), loss)


def batched(objective, federation):
    return BatchedEngine(objective, federation, seed=5, most=2)


def gram(objective, federation):
    layer = first_layer(objective, federation.samples.input_shape)
    return GramEngine(objective, federation, 5, layer, most=2)


def direct(objective, federation):
    return DirectEngine(objective, federation, seed=5)


def trained(make, algorithm, objective, federation, rounds):
    """The model, and every agent's scores."""
    engine, measure = make(objective, federation), Measure("accuracy")
    if federation.samples.targets.is_floating_point():
        measure = Measure("loss", None)
    w = objective.initial()
    *_, last = train(algorithm, engine, w, rounds=rounds, participation=0.6)
    states = dict.fromkeys(federation.split.agents, {})
    return last.server["model"], engine.evaluate(
        algorithm, last.server, states, steps=2, measure=measure
    )


def distances(algorithm, objective, federation, makes, rounds):
    """How far the engines' models are from the direct engine's; their scores must agree."""
    right, scores = trained(direct, algorithm, objective, federation, rounds)
    moved = float((right - objective.initial()).norm())
    assert moved > 0.01
    for make in makes:
        model, others = trained(make, algorithm, objective, federation, rounds)
        yield float((model - right).norm()) / moved
        assert len(others) == len(scores) == len(federation.split.agents)
        close = 1e-6 if objective.dtype == torch.float64 else 1e-3
        for score, other in zip(scores, others, strict=True):
            assert other.loss == pytest.approx(score.loss, rel=close)
            assert other.score == pytest.approx(score.score, rel=close)
            rest = ("agent", "name", "seen", "train_samples", "test_samples")
            assert [getattr(other, k) for k in rest] == [getattr(score, k) for k in rest]


def tolerance(algorithm):
    return OF_DIFFERENCES if isinstance(algorithm.curvature, HessianFree) else ROUNDING


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("module", MODULES)
def test_engines_agree_with_the_direct_engine(module, method):
    algorithm, objective = METHODS[method], objective_of(MODULES[module])
    for distance in distances(algorithm, objective, uneven_federation(), (batched, gram), 2):
        assert distance < tolerance(algorithm)
