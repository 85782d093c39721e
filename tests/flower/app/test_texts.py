"""Texts at the sites of a federation: next tokens, and named inputs with their mask."""

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

import nufed
from flower.app.in_memory import MemoryGrid
from flower.ops.small_app import files_of
from nufed.errors import InputError
from nufed.flower import App

SITES, LENGTH, TOKENS = 3, 6, 9
NEXT = """
name = "texts"
rounds = 2
eval_every = 2
baselines = ["untrained"]
metric = "perplexity"
[data]
agents = 3
test = 0.25
[model]
name = "gru"
args = {hidden = [5], vocabulary = 9, next_token = true}
[method]
meta_lr = 0.3
adapt_lr = 0.1
batch_size = 4
local_steps = 2
[federation]
input_shape = [6]
vocabulary = 9
wait = 0.01
deadline = 0.01
"""
NAMED = (
    NEXT.replace('"perplexity"', '"accuracy"')
    .replace("vocabulary = 9\nwait", 'vocabulary = 9\ninputs = ["ids", "mask"]\nwait')
    .replace("[federation]\n", '[federation]\nclasses = ["no", "yes"]\n')
)


def windows(site):
    """Inputs and the next tokens."""
    rng = np.random.default_rng(site)
    line = rng.integers(TOKENS, size=(16, LENGTH + 1))
    return line[:, :-1], line[:, 1:]


def masked(site):
    ids, _ = windows(site)
    mask = (np.arange(LENGTH) < 1 + np.arange(16)[:, None] % LENGTH).astype("int64")
    return {"ids": ids, "mask": mask}, ids[:, 0] % 2


class Words(nn.Module):
    """The mean of the embeddings that are not masked."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(TOKENS, 4), nn.Linear(4, 2)

    def forward(self, ids, mask):
        weight = (mask / mask.sum(dim=1, keepdim=True)).unsqueeze(2)
        return self.head((self.words(ids) * weight).sum(dim=1))


def federated(folder, text, load, **given):
    (folder / "federation.toml").write_text(text)
    app = App(folder / "federation.toml", lambda site: load(site["partition-id"]), **given)
    grid = MemoryGrid(app.site, range(SITES), folder / "sites")
    app.server(grid, Context(1, 0, {}, RecordDict(), {"out": str(folder / "run")}))
    return files_of(folder / "run")


def joined(parts):
    first = parts[0]
    if isinstance(first, dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in first}
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("text", "load", "given"), [(NEXT, windows, {}), (NAMED, masked, {"model": Words})]
)
def test_texts_give_the_simulators_bits(text, load, given, tmp_path):
    found = federated(tmp_path, text, load, **given)
    simulated = text.split("[federation]")[0].replace("agents = 3\n", "")
    (tmp_path / "simulated.toml").write_text(simulated)
    inputs, targets = (joined(part) for part in zip(*map(load, range(SITES)), strict=True))
    owners = np.repeat([str(site) for site in range(SITES)], 16)
    changes = ["engine=direct", "workers=1", "data.partition=given", "max_update_norm=100.0"]
    data = (inputs, targets, owners)
    nufed.run(tmp_path / "simulated.toml", changes, data=data, out=tmp_path / "sim", **given)
    assert found == files_of(tmp_path / "sim") and len(found) > 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x + 1, y), "whole numbers from 0 to 8, as federation.vocabulary says"),
        (lambda x, y: (x.astype("float32"), y), "must be identifiers of tokens"),
        (lambda x, y: (x[:, :5], y), r"inputs have shape \(5,\): federation.input_shape is \[6\]"),
        (lambda x, y: ({"ids": x}, y), "inputs are 'ids': federation.inputs says one array"),
        (lambda x, y: (x, y[:, :5]), "targets need 5 outputs: the federation has 6"),
    ],
)
def test_texts_that_do_not_fit_are_refused(change, message, tmp_path):
    (tmp_path / "federation.toml").write_text(NEXT)
    plan = App(tmp_path / "federation.toml", None).plan()
    x, y = (torch.from_numpy(part).numpy() for part in windows(0))
    plan.check_data(nufed.data.as_samples((x, y)))
    x[0, 0] = TOKENS - 1
    with pytest.raises(InputError, match=message):
        plan.check_data(nufed.data.as_samples(change(x, y)))
