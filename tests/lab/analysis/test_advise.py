"""Advice: without test data, by rules that can be checked by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import nufed
from nufed import InputError
from nufed.algorithms.protocol import Algorithm
from nufed.data import digits
from nufed.errors import RunError
from nufed.lab.analysis.advise import (
    Amount,
    Choice,
    Scored,
    advise,
    compare_automatic,
    fewest_samples,
    recommend,
)
from nufed.lab.report.analysis_tables import advice_notes, advice_tables

CONFIG = {
    "rounds": 8,
    "seeds": [0, 1],
    "participation": 0.5,
    "workers": 1,
    "baselines": [],
    "data": {"agents": 8, "samples_per_agent": 40, "dirichlet": 0.1, "unseen_agents": 3},
    "model": {"args": {"hidden": [8], "activation": "tanh"}},
    "method": {"adapt_steps": 2, "adapt_lr": 0.1, "meta_lr": 0.2, "batch_size": 6},
    "methods": {
        "fedavg": {"algorithm": "fedavg"},
        "gmeta-fo": {"algorithm": "gmeta", "curvature": "first_order"},
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return nufed.run(CONFIG, out=tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def advice(run):
    return advise(run, max_steps=6)


def test_the_cheapest_choice_as_good_as_the_best_is_recommended():
    rng = np.random.default_rng(0)
    base = rng.normal(size=(40, 1))
    rising = base + np.array([0.0, 1.0, 2.0, 2.0, 2.0]) + 1e-3 * rng.normal(size=(40, 5))
    assert recommend({("a", 1.0): rising}).steps == 2  # the first of three alike
    better = {("a", 1.0): rising, ("b", 3.0): rising + 1}
    assert recommend(better) == Choice("b", 3.0, 2)
    alike = {("a", 3.0): rising, ("b", 1.0): rising, ("c", 0.1): rising}
    assert recommend(alike) == Choice("b", 1.0, 2)  # the step size that was trained for
    broken = rising.copy()
    broken[3, 1:] = np.nan
    assert recommend({("a", 1.0): broken}).steps == 0  # it diverged for an agent


def test_the_fewest_samples_are_where_the_gain_stays_above_its_interval():
    def row(samples, gain, interval=0.1):
        return Amount(samples, 6, 0.5, 0.5 + gain, gain, interval)

    assert fewest_samples([row(5, 0.2), row(10, 0.05), row(20, 0.2), row(50, 0.3)]) == 20
    assert fewest_samples([row(5, 0.2), row(10, 0.05)]) is None
    assert fewest_samples([row(5, 0.2, None)]) is None and fewest_samples([]) is None


def test_automatic_steps_are_compared_with_the_best_and_the_default():
    scores = np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 3.0]])
    found = compare_automatic([1, 2], scores, default=0)
    assert found.mean == 2 and found.steps == 1.5
    assert found.best.steps == 2 and found.best.difference == 0.5
    assert found.default.difference == 2


def test_advice_of_a_run(run, advice):
    assert advice.agents == 6
    assert advice.scored_on == "training parts of agents unseen in training"
    curves = {(c.method, c.times): c for c in advice.curves}
    assert len(curves) == 10 and len(curves["fedavg", 1.0].points) == 7
    assert curves["fedavg", 3.0].lr == pytest.approx(0.3)
    starts = {(m, c.points[0].mean) for (m, _), c in curves.items()}
    assert len(starts) == 2  # before fine-tuning the step size does not matter
    assert [row.samples for row in advice.amounts] == [5, 10, 20]
    assert advice.training["gmeta-fo"]["gradients"] > advice.training["fedavg"]["gradients"]
    said = " ".join(advice_notes(advice))
    best = advice.recommended
    assert f"Recommended: {best.method}, {best.steps} fine-tuning step" in said
    assert "no test data" in said
    titles = [title for title, _ in advice_tables(advice)]
    assert len(titles) == 3
    written = json.loads(json.dumps(advice.record(), allow_nan=False))
    assert written["amounts"][0]["global"] == advice.amounts[0].shared
    assert written["recommended"]["method"] == best.method and written["left_out"] == []


def test_advice_does_not_depend_on_test_data(run, advice, monkeypatch):
    samples = digits()
    spoiled = samples.inputs.clone()
    for seed in run.config.seeds:
        split = nufed.lab.config.problem.build_split(run.config.data, samples, seed)
        kept = {row for part in split.train for row in part.tolist()}
        others = [r for part in split.test for r in part.tolist() if r not in kept]
        spoiled[others] = 0
    trains = [
        set(np.concatenate(nufed.lab.config.problem.build_split(run.config.data, samples, s).train))
        for s in run.config.seeds
    ]
    for rows in trains:  # test data of one seed may be training data of another
        spoiled[sorted(rows)] = samples.inputs[sorted(rows)]
    assert not torch.equal(spoiled, samples.inputs)
    changed = nufed.Samples(spoiled, samples.targets, samples.classes, scale=samples.scale)
    monkeypatch.setattr(nufed.lab.config.problem, "build_samples", lambda config: changed)
    run = replace(run, data_sha256=changed.fingerprint)
    assert advise(run, max_steps=6) == advice


def test_warnings_are_given_where_they_are_due(advice):
    useless = replace(advice, majority=0.99)
    assert "needs no model" in " ".join(advice_notes(useless))
    assert "needs no model" not in " ".join(advice_notes(replace(advice, majority=0.01)))
    seen = replace(advice, scored=(Scored("training", seen=True),))
    assert "optimistic; hold out" in " ".join(advice_notes(seen))
    few = replace(advice, recommended=replace(advice.recommended, samples=None))
    assert "for any amount of data" in " ".join(advice_notes(few))


def test_validation_parts_are_used_where_there_are_some(tmp_path):
    config = {**CONFIG, "seeds": [0], "methods": {}, "data": {**CONFIG["data"], "validation": 0.2}}
    run = nufed.run({**config, "data": {**config["data"], "unseen_agents": 0}}, out=tmp_path / "r")
    advice = advise(run, max_steps=1)
    assert advice.scored_on == "validation parts of agents seen in training"
    assert advice.agents == 8 and "optimistic; hold out" not in " ".join(advice_notes(advice))


def test_runs_of_objects_are_refused(tmp_path):
    rng = np.random.default_rng(0)
    own = rng.normal(size=(400, 4)), rng.integers(0, 3, 400)
    run = nufed.run({**CONFIG, "seeds": [0], "methods": {}}, data=own, out=tmp_path / "run")
    with pytest.raises(InputError, match="was given its data as Python objects"):
        advise(run)


def test_other_data_is_refused(run):
    with pytest.raises(RunError, match="the data is not that of"):
        advise(replace(run, data_sha256="0" * 64))


def test_a_method_without_a_global_model_is_excluded_and_named(run, monkeypatch):
    monkeypatch.setattr(
        nufed.algorithms.FedAvg,
        "global_model",
        lambda self, objective, received: None,
        raising=False,
    )
    found = advise(run, max_steps=1)
    assert {curve.method for curve in found.curves} == {"gmeta-fo"}
    assert [each.method for each in found.left_out] == ["fedavg"]
    assert "Left out: fedavg can't be bundled" in " ".join(advice_notes(found))
    monkeypatch.setattr(Algorithm, "global_model", lambda self, objective, received: None)
    with pytest.raises(InputError, match="no global model to fine-tune: fedavg can't"):
        advise(run, max_steps=1)
