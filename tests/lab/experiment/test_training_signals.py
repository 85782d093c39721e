"""The update norm and training loss of a round, and the warning about jumps."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import nufed
from nufed.evaluate import Measure, Scoring, evaluate_agent, training_loss
from nufed.lab.config import load_config
from nufed.lab.config.problem import Given, Problem
from nufed.lab.runs.warnings import jumps
from nufed.objective import Batch
from nufed.server import MemoryStates, initial_server, to_send
from support import agent_context, federation, mlp

pytestmark = pytest.mark.usefixtures("no_report")
CONFIG = {
    "rounds": 3,
    "participation": 0.5,
    "eval_every": 2,
    "save_every": 1,
    "baselines": [],
    "workers": 1,
    "data": {"agents": 6, "samples_per_agent": 20, "dirichlet": 1.0},
    "model": {"args": {"hidden": [6]}},
    "method": {"algorithm": "fedavg", "meta_lr": 0.3, "batch_size": 5},
    "methods": {"adam": {"algorithm": "gmeta", "server_optimizer": "adam"}},
}


def test_norm_and_loss_are_those_of_the_saved_models(tmp_path):
    run = nufed.run(CONFIG, out=tmp_path / "run")
    problem = Problem.make(load_config(CONFIG), Given())
    objective, data = problem.objectives[0], problem.federations[0]
    folder = run.path / "methods" / "adam" / "seed-0"
    models = [objective.initial()]
    models += [load_file(folder / f"model-round-00000{k}.safetensors")["model"] for k in (1, 2, 3)]
    lines = run.methods["adam"][0].metrics
    assert lines[0].update_norm is None
    for k in (1, 2, 3):
        assert math.isclose(lines[k].update_norm, (models[k] - models[k - 1]).norm(), rel_tol=1e-5)
    assert [line.training_loss is not None for line in lines] == [True, False, True, True]
    for k in (0, 2, 3):
        cohort = lines[max(k, 1)].cohort  # before training, of the first round
        losses = [
            objective.value(models[k], Batch(*data.samples.take(data.split.train[agent])))
            for agent in cohort
        ]
        assert math.isclose(lines[k].training_loss, np.mean(losses), rel_tol=1e-5)


def test_without_a_global_model_it_is_the_personal_models():
    data = federation(agents=3, samples=600, dtype=np.float64)  # more than one piece
    objective = nufed.Objective(mlp(), torch.nn.functional.cross_entropy)
    algorithm = load_config({"methods": {"fedper": {}}}).algorithms()["fedper"]
    server = initial_server(algorithm, objective, objective.initial())
    received, states = to_send(algorithm, server), MemoryStates()
    states.put(1, {1: algorithm.agent_init(objective, received)})
    found, cost = training_loss(algorithm, objective, data, [0, 1], received, states, 0)
    on_train = replace(data, split=replace(data.split, test=data.split.train))
    usual = []
    for agent in (0, 1):
        context = agent_context(objective, on_train.batches(agent, 0, "evaluate"))
        scoring, state = Scoring(0, Measure("loss", None)), states.get(agent)
        usual += evaluate_agent(algorithm, context, received, state, on_train, scoring)
    assert math.isclose(found, np.mean([s.loss[0] for s in usual]), rel_tol=1e-9)
    assert cost.gradients == sum(s.personal_gradients for s in usual)


def regression(lr, path):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(80, 4)).astype("float32")
    targets = inputs @ rng.normal(size=(4, 1)).astype("float32")
    config = {
        "rounds": 16,
        "participation": 1.0,
        "eval_every": 1,
        "baselines": [],
        "workers": 1,
        "data": {"agents": 2, "partition": "iid", "samples_per_agent": 40},
        "method": {"algorithm": "fedavg", "meta_lr": lr, "local_steps": 1, "batch_size": 20},
        "methods": {},
    }
    return nufed.run(config, data=(inputs, targets), model=torch.nn.Linear(4, 1), out=path)


def test_a_diverging_training_is_flagged_and_a_stable_one_is_not(tmp_path):
    """Gradient descent on a quadratic diverges for steps above 2 / λ_max, about 0.7 here."""
    stable = [w for w in regression(0.2, tmp_path / "0").warnings() if "unstable" in w.message]
    assert stable == []
    found = regression(1.1, tmp_path / "1")
    (warning,) = [w for w in found.warnings() if "unstable" in w.message]
    assert warning.about == "training" and 5 <= warning.first_round <= 14
    assert f"round {warning.first_round}: training became unstable: the " in str(warning)
    lines = found.methods["fedavg"][0].metrics
    norms = [line.update_norm for line in lines[1:]]
    assert norms[-1] > 10 * norms[0]


@pytest.mark.parametrize(
    ("values", "rounds"),
    [
        ([1.0] * 4 + [50.0], []),  # too few before it
        ([1.0] * 5 + [3.9, 4.1], [6]),
        ([1.0] * 6 + [math.nan], [6]),
        ([100.0, 1, 1, 1, 1, 1, 1, 1, 20, 30], [9]),  # below a quarter of the first
        ([1.0, 3, 9, 2, 6, 12, 4, 8, 30], []),  # no more than its usual spread
        (list(np.geomspace(1, 1e-6, 30)), []),
    ],
)
def test_the_rule_of_jumps(values, rounds):
    assert [round for round, _, _ in jumps(list(enumerate(values)))] == rounds
