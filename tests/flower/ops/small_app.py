"""A small app, and the same training in simulation."""

import sys
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np

import nufed
from nufed.flower.ops.local import new_app
from support import json_lines

CONFIG = """
name = "small"
rounds = {rounds}
participation = 1.0
eval_every = 2
eval_steps = 2
{top}
[data]
agents = {sites}
test = 0.25
[model]
name = "fcnn"
args = {{hidden = [6]}}
[method]
curvature = "first_order"
adapt_lr = 0.2
meta_lr = 0.3
batch_size = 6
local_steps = 2
[federation]
input_shape = [5]
classes = ["a", "b", "c"]
wait = {wait}
deadline = {deadline}
{tables}
"""
DATA = """
import numpy as np


def load(site):
    number = site["partition-id"]
    rng = np.random.default_rng(number)
    inputs = rng.normal(size=(24 + 4 * number, 5)).astype("float32")
    return inputs, (inputs @ np.random.default_rng(99).normal(size=(5, 3))).argmax(axis=1)
"""
FILES = ("agents.jsonl", "model.safetensors")


def write_app(folder, sites, rounds, data=DATA, wait=120.0, deadline=300.0, top="", tables=""):
    """An app as `nufed federate new` makes it, filled in."""
    new_app(folder)
    (folder / "my_data.py").write_text(data)
    (folder / "federation.toml").write_text(
        CONFIG.format(
            sites=sites, rounds=rounds, wait=wait, deadline=deadline, top=top, tables=tables
        )
    )
    return folder


def simulate(app, out, names="site-{}"):
    """The same configuration and data in simulation, with the federation's site names."""
    config = app / "federation.toml"
    simulated = out.with_suffix(".toml")
    simulated.write_text(config.read_text().split("[federation]")[0])
    spec = spec_from_file_location("site_data", app / "my_data.py")
    module = module_from_spec(spec)
    sys.modules.pop("site_data", None)
    spec.loader.exec_module(module)
    sites = nufed.lab.config.load_config(simulated).data.agents
    parts = [module.load({"partition-id": number}) for number in range(sites)]
    inputs, targets = (np.concatenate(part) for part in zip(*parts, strict=True))
    owners = np.repeat([names.format(i) for i in range(sites)], [len(y) for _, y in parts])
    overrides = ["engine=direct", "data.partition=given", "baselines=[]", "workers=1"]
    return nufed.run(simulated, overrides, data=(inputs, targets, owners), out=out)


def files_of(run):
    """The files that must be bit-identical in every run."""
    (part,) = run.glob("methods/*/seed-*")
    lines = json_lines(part / "metrics.jsonl")
    for line in lines:  # sites do not send it
        line.pop("training_loss", None)
    return {"metrics": lines} | {name: (part / name).read_bytes() for name in FILES}
