"""Which agents are held out from training: by number, by name, or as the data source says."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import nufed
from nufed import InputError, Samples
from nufed.lab.config import load_config
from nufed.lab.config.problem import build_split
from nufed.lab.runs import load_run

OWNERS = np.repeat(["ann", "bob", "eve"], 20)
DATA = Samples(torch.randn(60, 4), torch.arange(60) % 3, ("a", "b", "c"), OWNERS)
NEWCOMER = replace(DATA, unseen_owners=("eve",))
CONFIG = {"rounds": 1, "participation": 1.0, "method": {"batch_size": 5}, "baselines": []}


def unseen(samples, *overrides):
    split = build_split(load_config(CONFIG, overrides).data, samples, 0)
    return [split.names[agent] for agent in split.unseen]


def test_a_source_names_unseen_owners_and_a_configuration_replaces_them():
    assert unseen(DATA) == [] and unseen(NEWCOMER) == ["eve"]
    assert unseen(NEWCOMER, 'data.unseen=["ann"]') == ["ann"]
    assert unseen(NEWCOMER, "data.unseen=[]") == []
    assert len(unseen(NEWCOMER, "data.unseen_agents=2")) == 2
    assert unseen(NEWCOMER, "data.partition=iid", "data.agents=6") == []
    assert unseen(DATA, "data.partition=iid", "data.agents=6", 'data.unseen=["3"]') == ["3"]
    shared = ["data.partition=dirichlet", "data.agents=3", "data.reuse=across_agents"]
    assert unseen(DATA, *shared, "data.dirichlet=9.0", 'data.unseen=["2"]') == ["2"]


def test_the_digest_of_data_without_unseen_owners_is_as_before():
    assert replace(DATA, unseen_owners=()).fingerprint == DATA.fingerprint != NEWCOMER.fingerprint
    with pytest.raises(InputError, match=r"unseen_owners names 'zoe', .* the owners are ann, bob"):
        replace(DATA, unseen_owners=("zoe",))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (['data.unseen=["Eve"]'], "no agent is called 'Eve', .* did you mean 'eve'"),
        (['data.unseen=["eve"]', "data.unseen_agents=1"], "with data.unseen_agents = 1; set that"),
        (['data.unseen=["eve"]', "data.split_file=x"], "the split of data.split_file has unseen"),
        (["data.unseen=eve"], "data.unseen = 'eve': must be"),
    ],
)
def test_what_cannot_be_held_out_is_one_sentence(overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        unseen(DATA, *overrides)


def test_a_run_scores_and_names_the_unseen_agent(tmp_path):
    run = nufed.run(CONFIG, data=NEWCOMER, out=tmp_path / "run")
    assert run.unseen_names == ["eve"] and run.groups == ["seen", "unseen"]
    ((seed, trained),) = run.methods["gmeta"].items()
    assert seed == 0 and [s.name for s in trained.final if not s.seen] == ["eve"]
    assert "3, of which 1 unseen in training (eve)" in (tmp_path / "run/report.html").read_text()
    assert load_run(tmp_path / "run").unseen_names == ["eve"]
    again = nufed.run(CONFIG, ['data.unseen=["eve"]'], data=DATA, out=tmp_path / "again")
    assert (again.splits[0].sha256, again.unseen) == (run.splits[0].sha256, 1)
