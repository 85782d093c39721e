"""Sine waves: the ranges of Finn et al., and runs that are scored by the loss."""

import numpy as np
import pytest
import torch

import nufed
from nufed import InputError
from nufed.data import as_samples, given
from nufed.data.built_in import sinusoid


def test_every_agent_has_a_wave_of_its_own():
    samples = as_samples(sinusoid(agents=200, samples=30))
    rows, names = given(samples.owners)
    assert len(names) == 200 and list(map(int, names)) == list(range(200))
    x, y = samples.inputs.double().numpy(), samples.targets.double().numpy()
    assert -5 <= x.min() < -4.9 and 4.9 < x.max() <= 5
    amplitudes, phases = [], []
    for own in rows:  # y = a sin x + b cos x
        basis = np.hstack([np.sin(x[own]), np.cos(x[own])])
        (a, b), residual = np.linalg.lstsq(basis, y[own][:, 0], rcond=None)[:2]
        assert residual < 1e-10
        amplitudes.append(np.hypot(a, b))
        phases.append(np.arctan2(-b, a))
    assert 0.1 <= min(amplitudes) < 0.3 and 4.8 < max(amplitudes) <= 5
    assert -1e-6 <= min(phases) < 0.1 and np.pi - 0.1 < max(phases) <= np.pi + 1e-6


def test_it_depends_on_seed_and_agent_only():
    samples = sinusoid(agents=4, samples=6)
    more = sinusoid(agents=9, samples=6)
    assert torch.equal(samples.targets, more.targets[:24])
    assert sinusoid(agents=4, samples=6).fingerprint == samples.fingerprint
    assert sinusoid(agents=4, samples=6, seed=1).fingerprint != samples.fingerprint
    noisy = sinusoid(agents=4, samples=6, noise=0.5)
    assert torch.equal(noisy.inputs, samples.inputs)
    assert 0.2 < (noisy.targets - samples.targets).std() < 0.8


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"agents": 0}, "agents = 0: must be a whole number, at least 1"),
        ({"samples": 2.5}, "samples = 2.5: must be a whole number"),
        ({"noise": -1}, "noise = -1: must be a finite number, 0 or more"),
        ({"seed": True}, "seed = True: must be a whole number"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        sinusoid(**arguments)


TINY = [
    "rounds=2",
    "data.args={agents=8, samples=20}",
    "data.unseen_agents=2",
    "method.batch_size=4",
    "method.local_steps=2",
]


@pytest.mark.usefixtures("no_report")
def test_the_preset_runs_and_scores_by_the_loss(tmp_path):
    run = nufed.run("sinusoid", TINY, out=tmp_path / "run")
    rows = [row for row in run.rows() if row.kind == "method"]
    assert {row.name for row in rows} == {"fedavg", "fedavg-10-steps", "per-fedavg", "gmeta"}
    assert all(0 < row.personal.mean < 30 for row in rows)
    assert all(row.personal.mean == row.loss for row in rows if row.group == "seen")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("metric=accuracy", 'metric = "accuracy": this data has no classes.*metric = "none"'),
        ("loss=cross_entropy", 'loss = "cross_entropy": this data has no classes.*loss = "mse"'),
        ("data.partition=shards", "data.partition = 'shards': this data has no classes"),
    ],
)
def test_what_needs_classes_is_refused_in_one_sentence(override, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence) as caught:
        nufed.run("sinusoid", [*TINY, override], out=tmp_path / "run")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
