"""Advice: made on data that is no test data, and by rules that can be checked by hand."""

import json

import numpy as np
import pytest
import torch

import nufed
from nufed import InputError
from nufed.advise import Choice, advise, compare_automatic, enough, recommend
from nufed.data.sources import digits
from nufed.report.advice import advice_notes, advice_tables

CONFIG = {
    "rounds": 8,
    "seeds": [0, 1],
    "participation": 0.5,
    "workers": 1,
    "baselines": [],
    "data": {"agents": 8, "samples_per_agent": 40, "dirichlet": 0.1, "unseen_agents": 3},
    "model": {"args": {"hidden": [8], "activation": "tanh"}},
    "method": {"adapt_steps": 2, "adapt_lr": 0.1, "meta_lr": 0.2, "batch_size": 6},
    "methods": {"fedavg": {"algorithm": "fedavg"}, "gmeta-fo": {"curvature": "first_order"}},
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


def test_enough_data_is_where_the_gain_stays_beyond_its_interval():
    def row(samples, gain, interval=0.1):
        return {"samples": samples, "gain": gain, "interval": interval}

    assert enough([row(5, 0.2), row(10, 0.05), row(20, 0.2), row(50, 0.3)]) == 20
    assert enough([row(5, 0.2), row(10, 0.05)]) is None
    assert enough([row(5, 0.2, None)]) is None and enough([]) is None


def test_automatic_steps_stand_beside_the_best_and_the_default():
    scores = np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 3.0]])
    found = compare_automatic([1, 2], scores, default=0)
    assert found["mean"] == 2 and found["steps"] == 1.5
    assert found["best"]["steps"] == 2 and found["best"]["difference"] == 0.5
    assert found["default"]["difference"] == 2


def test_advice_of_a_run(run, advice):
    assert advice["agents"] == 6
    assert advice["scored"] == "training parts of agents unseen in training"
    curves = {(c["method"], c["times"]): c for c in advice["curves"]}
    assert len(curves) == 10 and len(curves["fedavg", 1.0]["points"]) == 7
    assert curves["fedavg", 3.0]["lr"] == pytest.approx(0.3)
    starts = {(m, c["points"][0]["mean"]) for (m, _), c in curves.items()}
    assert len(starts) == 2  # before fine-tuning the step size does not matter
    assert [row["samples"] for row in advice["amounts"]] == [5, 10, 20]
    assert advice["training"]["gmeta-fo"]["gradients"] > advice["training"]["fedavg"]["gradients"]
    said = " ".join(advice_notes(advice))
    best = advice["recommended"]
    assert f"Recommended: {best['method']}, {best['steps']} fine-tuning step" in said
    assert "no test data" in said
    titles = [title for title, _ in advice_tables(advice)]
    assert len(titles) == 3
    json.dumps(advice)


def test_advice_does_not_depend_on_test_data(run, advice, monkeypatch):
    samples = digits()
    spoiled = samples.inputs.clone()
    for seed in run.config.seeds:
        split = nufed.runs.build.build_split(run.config.data, samples, seed)
        kept = {row for part in split.train for row in part.tolist()}
        others = [r for part in split.test for r in part.tolist() if r not in kept]
        spoiled[others] = 0
    trains = [
        set(np.concatenate(nufed.runs.build.build_split(run.config.data, samples, s).train))
        for s in run.config.seeds
    ]
    for rows in trains:  # what is test data for one seed may be training data for another
        spoiled[sorted(rows)] = samples.inputs[sorted(rows)]
    assert not torch.equal(spoiled, samples.inputs)
    changed = nufed.Samples(spoiled, samples.targets, samples.classes, scale=samples.scale)
    monkeypatch.setattr(nufed.advise, "build_samples", lambda config: changed)
    assert advise(run, max_steps=6) == advice


def test_warnings_are_given_where_they_are_due(advice):
    useless = {**advice, "majority": 0.99}
    assert "does not need a model" in " ".join(advice_notes(useless))
    assert "does not need a model" not in " ".join(advice_notes({**advice, "majority": 0.01}))
    seen = {**advice, "scored": "training parts of agents seen in training"}
    assert "too good" in " ".join(advice_notes(seen))
    few = {**advice, "recommended": {**advice["recommended"], "samples": None}}
    assert "no amount of data" in " ".join(advice_notes(few))


def test_validation_parts_are_used_where_there_are_some(tmp_path):
    config = {**CONFIG, "seeds": [0], "methods": {}, "data": {**CONFIG["data"], "validation": 0.2}}
    run = nufed.run({**config, "data": {**config["data"], "unseen_agents": 0}}, out=tmp_path / "r")
    advice = advise(run, max_steps=1)
    assert advice["scored"] == "validation parts of agents seen in training"
    assert advice["agents"] == 8 and "too good" not in " ".join(advice_notes(advice))


def test_runs_of_objects_are_refused(tmp_path):
    rng = np.random.default_rng(0)
    own = rng.normal(size=(400, 4)), rng.integers(0, 3, 400)
    run = nufed.run({**CONFIG, "seeds": [0], "methods": {}}, data=own, out=tmp_path / "run")
    with pytest.raises(InputError, match="given its data, model or loss as objects"):
        advise(run)
