"""Curves of fitted models: which agents, which step sizes, and how they are read back and drawn."""

import json

import pytest
import torch

import nufed
from nufed import load_run
from nufed.errors import RunError
from nufed.evaluate import can_be_drawn
from nufed.lab.config import load_config
from nufed.lab.config.problem import Problem
from nufed.lab.report.charts import fits_chart
from nufed.lab.runs.part_files import FITS_FILE

CONFIG = {
    "rounds": 3,
    "eval_every": 3,
    "eval_steps": 2,
    "workers": 1,
    "dtype": "float64",
    "baselines": [],
    "data": {
        "source": "sinusoid",
        "args": {"agents": 6, "samples": 20},
        "validation": 0.25,
        "test": 0.25,
        "unseen_agents": 2,
    },
    "model": {"args": {"hidden": [5], "activation": "tanh"}},
    "method": {"batch_size": 10, "adapt_lr": 0.05, "meta_lr": 0.1},
    "methods": {"fedavg": {}, "ditto": {}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return nufed.run(CONFIG, out=tmp_path_factory.mktemp("fits") / "run", figures=False)


def test_the_curves_are_the_models_that_are_scored(run):
    """At an agent's test inputs the curve has the recorded loss: 81 points, linearly interpolated,
    are checked against the model itself on the grid, and its loss on the test part."""
    problem = Problem.make(load_config(CONFIG))
    federation, objective = problem.federations[0], problem.objectives[0]
    trained = run.methods["fedavg"][0]
    received = load_model(run, "fedavg")
    by_agent = {scores.agent: scores for scores in trained.final}
    assert [fit.agent for fit in trained.fits] == list(federation.split.unseen)
    for fit in trained.fits:
        assert not fit.seen and len(fit.predicted) == 3
        for steps, curve in enumerate(fit.predicted):
            w, scale = received, trained.step_sizes.scale(steps)
            batches = federation.batches(fit.agent, 0, "evaluate").draw("adapt", 10, steps)
            for batch in batches:
                w = w - 0.05 * scale * objective.grad(w, batch)
            grid = torch.tensor(fit.grid, dtype=torch.float64).view(-1, 1)
            assert torch.allclose(
                objective.predict(w, grid).flatten(), torch.tensor(curve, dtype=torch.float64)
            )
            inputs = torch.tensor(fit.test_inputs, dtype=torch.float64).view(-1, 1)
            targets = torch.tensor(fit.test_targets, dtype=torch.float64).view(-1, 1)
            loss = (objective.predict(w, inputs) - targets).square().mean()
            assert float(loss) == pytest.approx(by_agent[fit.agent].loss[steps])


def load_model(run, method):
    from safetensors.torch import load_file

    return load_file(run.path / f"methods/{method}/seed-0/model.safetensors")["model"]


def test_the_chart_plots_these_curves_for_every_method(run):
    spec = json.loads(fits_chart(run).to_json())
    (rows,) = spec["datasets"].values()
    assert {row["method"] for row in rows} == {"fedavg", "ditto"}
    fit = run.methods["ditto"][0].fits[0]
    shown = run.config.steps_of("ditto")[0]
    curve = [
        row["y"]
        for row in rows
        if row["method"] == "ditto"
        and row["agent"] == f"agent {fit.name}"
        and row.get("steps") == str(shown)
    ]
    assert tuple(curve) == fit.predicted[shown]
    training = [r for r in rows if r.get("samples") == "training" and r["method"] == "ditto"]
    assert len(training) == sum(len(f.train_inputs) for f in run.methods["ditto"][0].fits)


def test_a_damaged_file_is_refused(run, tmp_path):
    path = run.path / "methods/fedavg/seed-0" / FITS_FILE
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"seen": false', b'"seen": true'))
    with pytest.raises(RunError, match=FITS_FILE):
        load_run(run.path)
    path.write_bytes(content)


def test_only_curves_are_drawn():
    assert not can_be_drawn(Problem.make(load_config("quickstart", ["seeds=[0]"])).samples)
