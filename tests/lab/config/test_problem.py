"""The problem of a run is rebuilt only if data, split and objects are the same."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import nufed
from nufed import InputError
from nufed.errors import RunError
from nufed.lab.config import load_config
from nufed.lab.config.problem import Given, Problem

CONFIG = {
    "rounds": 1,
    "seeds": [0, 5],
    "workers": 1,
    "baselines": [],
    "data": {"agents": 4, "samples_per_agent": 20},
    "method": {"batch_size": 5},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return nufed.run(CONFIG, out=tmp_path_factory.mktemp("run") / "run", figures=False)


def test_the_rebuilt_problem_is_the_same(run):
    first = Problem.make(load_config(CONFIG)).with_step_sizes()
    again = Problem.rebuild(run.recorded, trust=False)
    assert list(again.federations) == [0, 5] and again.measure == first.measure
    for seed in first.federations:
        assert again.belongs_to(seed) == first.belongs_to(seed)
        vectors = (p.objectives[seed].initial() for p in (first, again))
        assert torch.equal(*vectors)
    assert list(Problem.rebuild(run.recorded, trust=False, seeds=[5]).objectives) == [5]


def test_other_data_and_another_split_are_named(run):
    with pytest.raises(RunError, match=r"the data is not that of .* instead of 000000000000"):
        Problem.rebuild(replace(run.recorded, data_sha256="0" * 64), trust=False)
    splits = {**run.recorded.splits, 5: "0" * 64}
    with pytest.raises(RunError, match=r"the split of seed 5 is not that of"):
        Problem.rebuild(replace(run.recorded, splits=splits), trust=False)


def test_objects_must_be_passed_again(tmp_path):
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    own = {"model": lambda: nn.Linear(4, 2), "data": (x, (x[:, 0] > 0).long())}
    run = nufed.run(CONFIG, out=tmp_path / "run", figures=False, **own)
    with pytest.raises(InputError, match="was given its data and model as Python objects"):
        Problem.rebuild(run.recorded, trust=False)
    with pytest.raises(InputError, match="was given its data as Python objects"):
        Problem.rebuild(run.recorded, Given(model=own["model"]), trust=False)
    assert Problem.rebuild(run.recorded, Given(**own), trust=False).config == run.config
    with pytest.raises(InputError, match="was given its model as Python objects"):
        nufed.make_bundle(run, "gmeta")  # which needs no data
    nufed.make_bundle(run, "gmeta", model=own["model"])


def test_a_partition_is_passed_as_an_object(tmp_path):
    def halves(samples, agents, samples_per_agent, rng, size):
        return {name: rng.permutation(len(samples))[:size] for name in ("left", "right")}

    own = {"partition": halves}
    data = {"agents": 4, "partition_args": {"size": 30}}
    run = nufed.run({**CONFIG, "data": data}, out=tmp_path / "run", figures=False, **own)
    assert run.agents == 2 and run.config.data.partition == "given in Python"
    with pytest.raises(InputError, match="was given its partition as Python objects"):
        Problem.rebuild(run.recorded, trust=False)
    again = Problem.rebuild(run.recorded, Given(**own), trust=False)
    assert again.federations[5].split.names == ("left", "right")
    assert nufed.resume(run.path, ["rounds=2"], figures=False, **own).config.rounds == 2
    nufed.make_personal(run, "gmeta", agent=1, **own)
