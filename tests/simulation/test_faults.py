"""Simulated faults: drawn from separate streams, named, and as documented."""

import re

import numpy as np
import pytest
import tomli_w
import torch

import nufed
from nufed import Federation, GMeta, InputError, Objective
from nufed.algorithms.protocol import AgentUpdate
from nufed.errors import TrainingError
from nufed.lab.cli.listing import listing
from nufed.lab.config import load_config
from nufed.lab.runs import load_run
from nufed.server import Rules, choose_cohort
from nufed.simulation import DirectEngine, Faults, train
from nufed.simulation.faults import ATTACKS
from support import context, federation, mlp, round_of

ALGORITHM = GMeta(adapt_steps=1, adapt_lr=0.3, meta_lr=0.2, local_steps=2, batch_size=6)


def trained(faults, rules=Rules(), rounds=6):
    objective = Objective(mlp(torch.float32))
    engine = DirectEngine(objective, federation(agents=10), seed=2)
    settings = {"rounds": rounds, "participation": 0.5, "rules": rules, "faults": faults}
    return list(train(ALGORITHM, engine, objective.initial(), **settings))


def test_fates_are_as_frequent_as_asked_and_the_same_for_every_method():
    faults, cohort = Faults(dropout=0.3, stragglers=0.2), list(range(20))
    fates = [faults.fates(cohort, seed=1, round=k) for k in range(400)]
    assert np.mean([len(f.dropped) for f in fates]) / 20 == pytest.approx(0.3, abs=0.02)
    assert np.mean([len(f.late) for f in fates]) / 20 == pytest.approx(0.7 * 0.2, abs=0.02)
    assert all(not set(f.dropped) & set(f.late) for f in fates)
    assert fates == [faults.fates(cohort, seed=1, round=k) for k in range(400)]


def test_a_round_with_dropouts_is_the_round_of_the_others():
    faults = Faults(dropout=0.4, stragglers=0.2)
    first, second = trained(faults, rounds=1)
    engine = DirectEngine(Objective(mlp(torch.float32)), federation(agents=10), 2)
    cohort = choose_cohort(range(10), 0.5, 2, 1)
    fates = faults.fates(cohort, 2, 1)
    assert fates.dropped or fates.late
    there = [a for a in cohort if a not in (*fates.dropped, *fates.late)]
    results = engine.agent_updates(ALGORITHM, first.server, {a: {} for a in there}, context(1))
    updates = [AgentUpdate(a, 1, 18, r.vectors) for a, r in results.items()]
    right, _ = round_of(ALGORITHM, first.server, updates, context(1))
    assert torch.equal(second.server["model"], right["model"])
    assert list(second.dropped) == fates.dropped
    assert [r.agent for r in second.rejected] == fates.late
    assert all("too late" in r.reason for r in second.rejected)


@pytest.mark.parametrize("attack", ["sign_flip", "scale", "gaussian", "nan"])
def test_what_corrupt_agents_send(attack):
    faults = Faults(corruption=0.2, attack=attack)
    before, vector = {"model": torch.ones(50)}, {"model": torch.full((50,), 3.0)}
    sent = faults.corrupted(vector, before, seed=0, round=3, agent=1)["model"]
    again = faults.corrupted(vector, before, seed=0, round=3, agent=1)["model"]
    other = faults.corrupted(vector, before, seed=0, round=4, agent=1)["model"]
    if attack == "sign_flip":
        assert torch.equal(sent, torch.full((50,), -1.0))
    elif attack == "scale":
        assert torch.equal(sent, torch.full((50,), 21.0))
    elif attack == "nan":
        assert torch.isnan(sent).all()
    else:
        assert float((sent - 1).norm()) == pytest.approx(10 * 2 * 50**0.5, rel=1e-5)
        assert torch.equal(sent, again) and not torch.equal(sent, other)


def test_an_attack_is_written_in_one_place(monkeypatch):
    allowed = r"faults.attack = 'zero': must be one of sign_flip, .*labels"
    with pytest.raises(InputError, match=allowed):
        load_config({"faults": {"attack": "zero"}})
    monkeypatch.setitem(ATTACKS, "zero", lambda vector, before, rng: 0 * vector)
    faults = Faults(**dict(load_config({"faults": {"attack": "zero", "corruption": 0.2}}).faults))
    vectors = {"model": torch.ones(3)}
    assert not faults.corrupted(vectors, vectors, seed=0, round=3, agent=1)["model"].any()
    listed = listing()
    assert "zero" in listed["attacks"] and "zero" in listed["configuration keys"]["faults.attack"]


def test_a_run_with_nan_updates_equals_one_without_those_agents():
    faults = Faults(corruption=0.3, attack="nan")
    corrupt = faults.corrupt_agents(list(range(10)), seed=2)
    assert len(corrupt) == 3
    for progress in trained(faults)[1:]:
        assert {r.agent for r in progress.rejected} == corrupt & set(progress.cohort)
        assert torch.isfinite(progress.server["model"]).all()


def test_labels_are_flipped_in_the_training_parts_of_corrupt_agents_only():
    data = federation(agents=10)
    faults = Faults(corruption=0.3, attack="labels")
    spoiled = faults.flip_labels(data, seed=2)
    corrupt = faults.corrupt_agents(list(range(10)), seed=2)
    for agent in range(10):
        train, test = data.split.train[agent], data.split.test[agent]
        assert torch.equal(spoiled.samples.targets[test], data.samples.targets[test])
        right = data.samples.targets[train]
        wrong = 2 - right if agent in corrupt else right
        assert torch.equal(spoiled.samples.targets[train], wrong)
    assert Faults(attack="labels").flip_labels(data, 2) is data
    lazy = Federation(data.samples, type("Split", (), {"recipe": object()})())
    with pytest.raises(InputError, match=r"share no samples"):
        faults.flip_labels(lazy, 2)


def test_below_the_quorum_a_round_is_retried_and_then_the_run_stops():
    faults = Faults(dropout=0.5)
    rules = Rules(min_updates=4, attempts=50)
    attempts = [progress.attempts for progress in trained(faults, rules)[1:]]
    assert max(attempts) > 1
    for progress in trained(faults, rules)[1:]:
        assert len(progress.cohort) - len(progress.dropped) >= 4
        expected = choose_cohort(range(10), 0.5, 2, progress.round, progress.attempts - 1)
        assert list(progress.cohort) == expected
    with pytest.raises(TrainingError, match=r"fewer than min_updates = 5.*in 3 attempts"):
        trained(faults, Rules(min_updates=5), rounds=50)


@pytest.mark.parametrize(
    "bad", [{"dropout": 1.0}, {"stragglers": -0.1}, {"corruption": float("nan")}]
)
def test_bad_rates_are_refused(bad):
    (name,) = bad
    with pytest.raises(InputError, match=f"{name} = "):
        Faults(**bad)
    with pytest.raises(InputError, match=f"faults.{name} = "):
        nufed.lab.config.load_config({"faults": bad})


def test_updates_rejected_in_earlier_attempts_are_recorded(caplog):
    rules = Rules(min_updates=4, attempts=50)
    rounds = trained(Faults(stragglers=0.4), rules)[1:]
    for progress in rounds:
        fates = [
            Faults(stragglers=0.4).fates(
                choose_cohort(range(10), 0.5, 2, progress.round, attempt),
                2,
                progress.round,
                attempt,
            )
            for attempt in range(progress.attempts)
        ]
        assert [r.agent for r in progress.rejected] == [a for f in fates for a in f.late]
    assert max(progress.attempts for progress in rounds) > 1
    logged = [f"update left out: {error}" for p in rounds for error in p.rejected]
    assert caplog.messages == logged


CONFIG = {
    "rounds": 6,
    "seeds": [0, 1],
    "workers": 1,
    "participation": 0.5,
    "min_updates": 1,
    "max_update_norm": 4.0,
    "data": {"agents": 12, "samples_per_agent": 24, "dirichlet": 0.5, "test": 0.25},
    "model": {"args": {"hidden": [8]}},
    "method": {"adapt_lr": 0.1, "meta_lr": 0.1, "batch_size": 6},
    "faults": {"dropout": 0.3, "stragglers": 0.2, "corruption": 0.25, "attack": "scale"},
    "baselines": [],
}


def test_a_run_with_faults_names_them_in_metrics_report_and_log(tmp_path, caplog):
    run = nufed.run(CONFIG, out=tmp_path / "run")
    lines = run.methods["gmeta"][0].metrics
    assert sum(len(line.dropped) for line in lines) > 0
    reasons = {r.reason.split(",")[0] for line in lines for r in line.rejected}
    assert "it answered too late" in reasons
    assert any("its change has norm" in reason for reason in reasons)
    named = run.rejected()
    assert all(re.match(r"gmeta, seed [01], agent \d+, round \d: it", line) for line in named)
    assert {r.levelname for r in caplog.records} == {"WARNING"}
    assert caplog.messages == [f"update left out: {line}" for line in named]
    page = (run.path / "report.html").read_text("utf-8")
    (line,) = run.unanswered()
    assert line in page and "Requests without a response" in page
    assert f"Updates left out:</b> {len(named)}" in page
    assert all((f"<li>{line}</li>" in page) == (i < 20) for i, line in enumerate(named))
    assert (f"and {len(named) - 20} more" in page) == (len(named) > 20)


def test_the_command_line_shows_the_first_and_counts_the_rest(tmp_path, nufed, caplog):
    """With four processes, two parts at a time: their records reach the first process."""
    (tmp_path / "config.toml").write_text(tomli_w.dumps(CONFIG | {"workers": 4}))
    said = nufed("run", "config.toml", "--out", "run", cwd=tmp_path).stderr.splitlines()
    named = [f"update left out: {line}" for line in load_run(tmp_path / "run").rejected()]
    assert sorted(caplog.messages) == sorted(named)
    shown = [line for line in said if "update left out" in line]
    assert shown == [f"nufed: warning: {message}" for message in caplog.messages[:5]]
    assert said[-1].startswith(f"nufed: {len(named) - 5} more such warnings")
