"""Uncalibrated sensors: one law, and a gain of each agent's own."""

import numpy as np
import pytest
import torch

import nufed
from nufed import InputError
from nufed.data import as_samples, given
from nufed.data.built_in import sensors


def laws(samples):
    """The law that fits each agent's samples best."""
    x, y = samples.inputs.double().numpy(), samples.targets.double().numpy()
    rows, names = given(samples.owners)
    assert list(map(int, names)) == list(range(len(names)))
    return np.stack([np.linalg.lstsq(x[own], y[own][:, 0], rcond=None)[0] for own in rows])


def test_agents_share_the_direction_of_their_law_and_not_its_length():
    samples = as_samples(sensors(agents=300, samples=30, noise=0.0))
    assert samples.input_shape == (20,) and samples.outputs == 1
    own = laws(samples)  # θ/g_i
    lengths = np.linalg.norm(own, axis=1)
    directions = own / lengths[:, None]
    assert np.abs(directions - directions[0]).max() < 1e-3
    gains = np.sort(2 / lengths)
    assert 0.1 - 1e-4 < gains[0] < 0.11 and 0.95 < gains[-1] < 1 + 1e-4
    assert abs(np.log(gains).mean() - np.log(0.1) / 2) < 0.1  # log-uniform: its mean is 0.32
    assert 3.6 < samples.targets.square().mean() < 4.4  # ‖θ‖² = 4


def test_it_depends_on_seed_and_agent_only():
    samples, more = sensors(agents=4, samples=6), sensors(agents=9, samples=6)
    assert torch.equal(samples.targets, more.targets[:24])
    assert sensors(agents=4, samples=6).fingerprint == samples.fingerprint
    assert sensors(agents=4, samples=6, seed=1).fingerprint != samples.fingerprint
    noisy = sensors(agents=100, samples=20, noise=0.5)
    clean = sensors(agents=100, samples=20, noise=0.0)
    assert torch.equal(noisy.inputs, clean.inputs)
    assert 0.45 < (noisy.targets - clean.targets).std() < 0.55


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"inputs": 0}, "inputs = 0: must be a whole number, at least 1"),
        ({"samples": True}, "samples = True: must be a whole number"),
        ({"noise": float("nan")}, "noise = nan: must be a finite number, 0 or more"),
        ({"seed": -1}, "seed = -1: must be a whole number, at least 0"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        sensors(**arguments)


@pytest.mark.usefixtures("no_report")
def test_the_preset_runs(tmp_path):
    tiny = ["rounds=2", "data.args={agents=8, samples=20}", "data.unseen_agents=2"]
    run = nufed.run("sensors", [*tiny, "method.batch_size=5"], out=tmp_path / "run")
    assert all(0 < row.personal.mean < 30 for row in run.rows() if row.kind == "method")
