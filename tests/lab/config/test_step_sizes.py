"""Default step sizes from a look at the problem: by hand, recorded, only where none is given."""

import tomllib

import numpy as np
import pytest
from torch import nn

import nufed
from nufed.algorithms import ALGORITHMS
from nufed.lab.config import load_config
from nufed.lab.config.problem import PROBED_AGENTS, PROBES, Given, Problem
from nufed.meta.curvature import curvature_along
from nufed.objective import Batch
from support import quadratic

CONFIG = {
    "rounds": 2,
    "seeds": [3],
    "eval_every": 2,
    "workers": 1,
    "baselines": [],
    "data": {"agents": 6, "samples_per_agent": 40, "dirichlet": 0.5, "unseen_agents": 1},
    "model": {"args": {"hidden": [6], "activation": "tanh"}},
}
SMALL = {"batch_size": 8}


def looked(**tables):
    return Problem.make(load_config({**CONFIG, **tables})).with_step_sizes()


def test_curvature_along_gradients_of_quadratics():
    objective, make = quadratic()
    batches, w, most = [make(i) for i in range(4)], objective.initial(), 0.0
    for a, b in batches:
        g = a @ w - b
        most = max(most, float(g @ a @ g / (g @ g)))
        w = w - g / most
    assert curvature_along(objective, objective.initial(), batches) == pytest.approx(most)
    # 1/κ minimises a quadratic along its gradient
    (a, b), w = make(7), objective.initial()
    g, kappa = a @ w - b, curvature_along(objective, objective.initial(), [make(7)])
    values = [float(objective.value(w - t * g / kappa, (a, b))) for t in (0.9, 1.0, 1.1)]
    assert values[1] < min(values[0], values[2])
    assert curvature_along(objective, w, []) == 0 and curvature_along(objective, w, [], 2.0) == 2


def test_step_sizes_that_are_not_given_are_half_of_the_inverse_curvature():
    problem = looked(method=SMALL, methods={"gmeta": {}, "ditto": {}, "fixed": {**FIXED}})
    objective, federation, most = problem.objectives[3], problem.federations[3], 0.0
    for agent in federation.split.seen[:PROBED_AGENTS]:
        w = objective.initial()
        for batch in federation.batches(agent, 3, "look").draw("outer", 8, PROBES):
            batch = Batch(batch.inputs, batch.targets)
            g = objective.grad(w, batch)
            most = max(most, abs(float(g @ objective.hvp(w, batch, g) / (g @ g))))
            w = w - g / most
    expected = float(f"{0.5 / float(f'{most:.3g}'):.2g}")
    made = problem.algorithms
    assert problem.config.measured_curvature == pytest.approx(most, rel=1e-2)
    assert (made["gmeta"].meta_lr, made["gmeta"].adapt_lr) == (expected, expected)
    assert made["ditto"].personal_lr == expected  # it follows meta_lr
    assert (made["fixed"].meta_lr, made["fixed"].adapt_lr) == (0.07, expected)
    # what is recorded are numbers, and looking again changes nothing
    text = problem.config.to_toml()
    assert "auto" not in tomllib.loads(text)["method"].values()
    again = load_config(tomllib.loads(text))
    assert again == problem.config and problem.with_step_sizes() is problem
    assert again.fingerprint == problem.config.fingerprint


FIXED = {"algorithm": "gmeta", "meta_lr": 0.07}


def test_optimisers_whose_steps_are_longer_or_no_gradients():
    methods = {
        "sgd": {"algorithm": "fedavg"},
        "heavy": {"algorithm": "fedavg", "momentum": 0.5},
        "nesterov": {"algorithm": "fedavg", "optimizer": "nesterov"},
        "adamw": {"algorithm": "fedavg", "optimizer": "adamw"},
        "auto": {"algorithm": "fedavg", "meta_lr": "auto"},
    }
    problem = looked(method=SMALL, methods=methods)
    sgd = 0.5 / problem.config.measured_curvature
    found = {name: a.meta_lr for name, a in problem.algorithms.items()}
    assert found == {
        "sgd": pytest.approx(sgd, rel=0.06),
        "heavy": pytest.approx(sgd / 2, rel=0.06),
        "nesterov": pytest.approx(sgd / 10, rel=0.06),
        "adamw": 0.001,
        "auto": found["sgd"],
    }


def test_a_federation_and_models_that_can_not_be_looked_at_take_the_classes_defaults():
    loaded = load_config({"methods": {"gmeta": {}}})
    assert loaded.method.meta_lr == loaded.method.adapt_lr == "auto"
    federated = loaded.written_out().method  # as apps of a federation do
    assert (federated.meta_lr, federated.adapt_lr) == (0.001, 0.01)

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x):
            raise ValueError("not today")

    config = load_config({**CONFIG, "method": SMALL})
    problem = Problem.make(config, Given(model=Fails)).with_step_sizes()
    assert (
        problem.config.measured_curvature is None and problem.algorithms["gmeta"].meta_lr == 0.001
    )


def test_a_run_records_the_numbers_and_resumes_with_them(tmp_path):
    run = nufed.run({**CONFIG, "method": SMALL}, out=tmp_path / "run", figures=None)
    recorded = tomllib.loads((run.path / "config.toml").read_text())
    used = recorded["method"]["meta_lr"]
    assert used == float(f"{0.5 / recorded['measured_curvature']:.2g}")
    longer = nufed.resume(run.path, ["rounds=3"], figures=None)
    assert longer.config.algorithms()["gmeta"].meta_lr == used
    explicit = {**CONFIG, "method": {**SMALL, "meta_lr": used, "adapt_lr": used}}
    same = nufed.run(explicit, out=tmp_path / "same", figures=None)
    assert (
        same.config.fingerprint == run.config.fingerprint and same.config.measured_curvature is None
    )


DATA = {
    "digits": {
        "data": {"source": "digits", "agents": 6, "samples_per_agent": 40, "dirichlet": 0.5},
        "model": {"args": {"hidden": [12], "activation": "tanh"}},
    },
    "sinusoid": {
        "data": {"source": "sinusoid", "args": {"agents": 10, "samples": 40}},
        "model": {"args": {"hidden": [20, 20], "activation": "tanh"}},
    },
    "heart": {"data": {"source": "heart"}, "model": {"args": {"hidden": [8]}}},
}
NEED_CLASSES = {"fedrod", "knn_per", "fedpac", "fedproto"}
"""Methods that refuse the numbers of the sinusoid."""


def check_defaults(source, rounds, out):
    """Personal models are at least as good as the untrained start, beyond noise."""
    names = [n for n in ALGORITHMS if source != "sinusoid" or n not in NEED_CLASSES]
    tables = DATA[source]
    config = {
        "rounds": rounds,
        "eval_every": rounds,
        "participation": 0.5,
        "baselines": [],
        "seeds": [0],
        "data": {**tables["data"], "test": 0.25, "small_agents": "use_all"},
        "model": tables["model"],
        "methods": {name: {} for name in names},
    }
    run = nufed.run(config, out=out, figures=None)
    assert sorted(run.methods) == sorted(names)
    assert [w for w in run.warnings() if w.about == "training" and "below" in w.message] == []
    gains = {}
    for name in names:
        ends, steps = run.methods[name][0].metrics, run.config.steps_of(name)[0]
        first, last = (ends[end].evaluation["seen"].loss[steps] for end in (0, -1))
        gains[name] = 1 - last / first
    return gains


# fedbn says that the models have no normalisation layers, so that it is FedAvg
without_warnings = pytest.mark.filterwarnings("ignore::nufed.errors.NumericalWarning")


@without_warnings
def test_every_method_with_its_defaults_is_no_worse_than_the_untrained_start(tmp_path):
    """All methods in one short run, which takes some seconds; the slow test trains for longer."""
    gains = check_defaults("digits", 3, tmp_path / "run")
    assert gains["fedavg"] > 0.1 and np.median(list(gains.values())) > 0.1, gains


@without_warnings
@pytest.mark.slow
@pytest.mark.parametrize("source", DATA)
def test_every_method_with_its_defaults_learns(source, tmp_path):
    gains = check_defaults(source, 20, tmp_path / "run")
    assert np.median(list(gains.values())) > 0.2, gains
