"""Shifts between groups of agents: rotated images and permuted labels."""

import numpy as np
import pytest
import torch

import nufed
from nufed import InputError, Samples
from nufed.data.shift import _rotated, permuted_labels, rotation
from nufed.flower.app.apps import _check
from nufed.lab.config.load import load_config
from nufed.lab.config.problem import build_federation, build_samples, build_shift, build_split
from support import Killed, file_hashes

AGENTS = [np.array([0, 4]), np.array([1, 5]), np.array([2]), np.array([3])]


def images(*shape, dtype=torch.uint8, owners=None):
    values = torch.arange(6 * int(np.prod(shape))).reshape(6, *shape) % 251
    return Samples(values.to(dtype), torch.arange(6) % 3, tuple("abc"), owners)


@pytest.mark.parametrize("shape", [(5, 5), (1, 5, 5), (3, 4, 4)])
def test_quarter_turns_only_move_pixels(shape):
    samples = images(*shape)
    turned = rotation(samples, AGENTS, 0)
    for agent, rows in enumerate(AGENTS):
        for row in rows:
            right = np.rot90(samples.inputs[row].numpy(), agent, axes=(-2, -1))
            assert (turned.inputs[row].numpy() == right).all()
    assert turned.targets is samples.targets and turned.inputs.dtype == torch.uint8
    assert (samples.inputs == images(*shape).inputs).all()  # it is a copy


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_other_angles_interpolate_and_agree_with_quarter_turns(dtype):
    x = images(3, 8, 8, dtype=dtype).inputs
    for angle in (90, 180, 270, -90, 360):
        torch.testing.assert_close(_rotated(x, angle + 1e-9), _rotated(x, angle), atol=1e-4, rtol=0)
    wide = images(7, 4, dtype=dtype).inputs
    torch.testing.assert_close(_rotated(wide, 180 + 1e-9), _rotated(wide, 180), atol=1e-4, rtol=0)
    # a smooth image there and back again, but for the corners
    y, z = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    smooth = (y + 2 * z)[None]
    back = _rotated(_rotated(smooth, 30), -30)
    assert (back - smooth)[:, 5:11, 5:11].abs().max() < 1e-4
    assert not torch.equal(_rotated(smooth, 30), smooth)


def test_labels_are_permuted_group_by_group():
    samples = Samples(torch.zeros(400, 1), torch.arange(400) % 10, tuple("0123456789"))
    agents = np.split(np.arange(400), 8)
    shifted = permuted_labels(samples, agents, seed=1, groups=3)
    seen = []
    for group in range(3):
        rows = np.concatenate(agents[group::3])
        pairs = set(
            zip(samples.targets[rows].tolist(), shifted.targets[rows].tolist(), strict=True)
        )
        assert len(pairs) == 10 and sorted(b for _, b in pairs) == list(range(10))
        seen.append(tuple(b for _, b in sorted(pairs)))
    assert seen[0] == tuple(range(10)) and len(set(seen)) == 3
    again, other = (permuted_labels(samples, agents, seed=s, groups=3).targets for s in (1, 2))
    assert torch.equal(again, shifted.targets) and not torch.equal(other, shifted.targets)
    assert shifted.inputs is samples.inputs


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.shift_args={angles=[]}"], "angles = .*: must be a list of finite numbers"),
        (["data.shift_args={angles=[1, inf]}"], "must be a list of finite numbers"),
        (["data.shift_args={angels=[1]}"], "fails with arguments {'angels': .*TypeError"),
        (["data.shift_args={seed=1}"], "must not set seed"),
        (["data.reuse=across_agents"], "agents share samples: set data.reuse"),
        (["data.shift=none", "data.shift_args={groups=2}"], "there is no shift; set data.shift"),
        (["data.shift=permuted_labels", "data.shift_args={groups=0}"], "groups = 0: must be a"),
        (["data.source=sinusoid"], r"needs images .* and the data has shape \(1,\)"),
        (
            ["data.source=sinusoid", "data.shift=permuted_labels"],
            "this data has no classes; use data with classes",
        ),
    ],
)
def test_bad_settings_are_one_clear_sentence(overrides, sentence):
    data = load_config({}, ["data.shift=rotation", *overrides]).data
    samples = build_samples(data)
    with pytest.raises(InputError, match=sentence) as caught:
        build_shift(data, samples, build_split(data, samples, 0), 0)
    assert "\n" not in str(caught.value)


def test_images_that_are_not_square():
    with pytest.raises(InputError, match=r"needs square images.*angles = \[0, 180\]"):
        rotation(images(4, 5), AGENTS, 0)
    turned = rotation(images(4, 5), AGENTS, 0, angles=[0, 180])
    assert torch.equal(turned.inputs[1], images(4, 5).inputs[1].flip(0, 1))


def test_names_and_federations():
    with pytest.raises(InputError, match=r"data.shift = 'rotatoin': must be one of none, rotation"):
        load_config({}, ["data.shift=rotatoin"])
    config = load_config({}, ["data.shift=rotation", "federation.input_shape=[64]"])
    with pytest.raises(InputError, match=r"data.shift.* is for simulation"):
        _check(config)


def test_configurations_without_a_shift_keep_their_fingerprint():
    text = load_config("quickstart").to_toml()
    assert "shift" not in text
    shifted = load_config("quickstart", ["data.shift=rotation", "data.shift_args={angles=[0,45]}"])
    assert shifted.fingerprint != load_config("quickstart").fingerprint
    assert 'shift = "rotation"' in shifted.to_toml() and "45" in shifted.to_toml()


def test_agents_train_and_are_scored_on_shifted_samples():
    config = load_config("quickstart", ["data.shift=rotation"])
    samples = build_samples(config.data)
    federation = build_federation(config, samples, 0)
    for agent in range(8):
        before = samples.inputs[federation.scored_rows(agent)].numpy()
        after, _ = federation.scored(agent)
        right = np.rot90(before, agent, axes=(-2, -1)) / 16
        assert np.allclose(after.numpy(), right)


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("shift", ["rotation", "permuted_labels"])
def test_a_run_resumes_to_the_same_bits(tmp_path, shift):
    config = {
        "rounds": 2,
        "checkpoint_every": 1,
        "baselines": ["majority"],
        "eval_lr": "as_trained",
        "data": {
            "agents": 5,
            "partition": "dirichlet_by_class",
            "dirichlet": 0.3,
            "partition_args": {"min_size": 12},
            "samples_per_agent": 24,
            "small_agents": "use_all",
            "shift": shift,
        },
        "model": {"args": {"hidden": [4]}},
        "method": {"batch_size": 20},
        "methods": {"fedavg": {"algorithm": "fedavg"}},
        "participation": 1.0,
    }
    whole = nufed.run(config, out=tmp_path / "whole")

    def killed(event):
        if event.round == 1:
            raise Killed

    with pytest.raises(Killed):
        nufed.run(config, out=tmp_path / "run", on_progress=killed)
    nufed.resume(tmp_path / "run")
    assert file_hashes(tmp_path / "run") == file_hashes(whole.path)
