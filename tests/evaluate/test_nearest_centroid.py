"""The baseline of nearest class means, and parts with their share of every class."""

import numpy as np
import pytest
import torch

import nufed
from nufed import Federation, InputError, Samples
from nufed.data import make_split
from nufed.evaluate import nearest_centroid
from nufed.lab.config import load_config


def problem(stratified=True):
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(4), [20, 20, 12, 8]))
    inputs = rng.normal(size=(60, 3, 2)) + np.eye(4)[labels][:, :3, None]
    samples = Samples(torch.tensor(inputs), torch.tensor(labels), classes=tuple("abcd"))
    classes = labels if stratified else None
    return samples, make_split([np.arange(60)], 0, validation=0.25, test=0.5, classes=classes)


def test_every_part_has_its_share_of_each_class():
    samples, split = problem()
    counts = [
        np.bincount(samples.targets[part[0]]).tolist()
        for part in (split.train, split.validation, split.test)
    ]
    assert counts == [[5, 5, 3, 2], [5, 5, 3, 2], [10, 10, 6, 4]]
    _, plain = problem(stratified=False)
    assert np.bincount(samples.targets[plain.train[0]]).tolist() != [5, 5, 3, 2]
    assert sorted(np.concatenate([split.train[0], split.validation[0], split.test[0]])) == list(
        range(60)
    )


def test_it_predicts_the_class_with_the_nearest_mean():
    samples, split = problem()
    federation = Federation(samples, split)
    got = nearest_centroid(federation, 0, steps=2)
    x, y = samples.inputs.numpy().reshape(60, -1), samples.targets.numpy()
    train, test = split.train[0], split.test[0]
    right = 0
    for row in test:
        means = [x[train][y[train] == c].mean(axis=0) for c in range(4)]
        right += int(np.argmin([np.linalg.norm(x[row] - m) for m in means])) == y[row]
    assert got.score == (right / 30,) * 3 and 0.3 < right / 30 < 1
    assert np.isnan(got.loss[0]) and got.global_score is None


CONFIG = {
    "rounds": 2,
    "workers": 1,
    "baselines": ["centroid", "local"],
    "data": {"agents": 4, "samples_per_agent": 60, "dirichlet": 100.0, "test": 0.25},
    "model": {"args": {"hidden": [4]}},
    "method": {"batch_size": 6, "meta_lr": 0.01, "adapt_lr": 0.05},
    "methods": {"fedavg": {}},
}


@pytest.mark.usefixtures("no_report")
def test_a_run_scores_it_and_trains_local_with_its_own_step_size(tmp_path):
    rows = {}
    for name, local_lr in (("usual", None), ("same", 0.01), ("larger", 0.3)):
        config = CONFIG | ({} if local_lr is None else {"local_lr": local_lr})
        run = nufed.run(config, out=tmp_path / name)
        rows[name] = {row.name: row for row in run.rows()}
    assert 0.5 < rows["usual"]["centroid"].personal.mean < 1
    usual, same, larger = (rows[name]["local"].loss for name in ("usual", "same", "larger"))
    assert usual == same and larger < usual


def test_what_has_no_classes_is_refused_or_left_out(tmp_path):
    sine = {**CONFIG, "data": {"source": "sinusoid", "args": {"agents": 4, "samples": 30}}}
    with pytest.raises(InputError, match=r"data\.stratify = True: this data has no classes"):
        nufed.run({**sine, "data": {**sine["data"], "stratify": True}}, out=tmp_path / "run")
    sharing = {**CONFIG["data"], "stratify": True, "reuse": "across_agents"}
    with pytest.raises(InputError, match=r"draws every part by itself; remove it"):
        nufed.run({**CONFIG, "data": sharing}, out=tmp_path / "run")
    assert "stratify" not in load_config(CONFIG).model_dump()["data"]
