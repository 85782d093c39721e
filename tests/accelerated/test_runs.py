"""Runs of configurations on the test accelerator write the CPU's files, to the bit: checkpoints,
models, agents' states, scores; with every aggregation rule and codec, resumed, bundled, adapted."""

import pytest
import torch

import nufed
from accelerator import NAME
from nufed.algorithms.aggregation import AGGREGATIONS
from nufed.algorithms.compression import CODECS
from nufed.lab.files import read_sealed
from support import Killed, file_hashes, without_report

CONFIG = {
    "rounds": 2,
    "participation": 0.5,
    "seeds": [0],
    "engine": "direct",
    "baselines": ["local"],
    "data": {
        "source": "digits",
        "agents": 5,
        "samples_per_agent": 30,
        "validation": 0.2,
        "unseen_agents": 1,
    },
    "model": {"name": "fcnn", "args": {"hidden": [8]}},
    "method": {"batch_size": 8, "local_steps": 2},
    "methods": {
        "exact": {"algorithm": "gmeta", "adapt_steps": 2, "curvature": "exact"},
        "ditto": {"algorithm": "ditto"},
    },
}
DITTO = {"ditto": CONFIG["methods"]["ditto"]}
EXACT = {"exact": CONFIG["methods"]["exact"]}


def files(folder):
    """The contents of a run's files that do not name its configuration, and so its device."""
    names = ("metrics.jsonl", "agents.jsonl", "step-sizes.json", "resampled.jsonl")
    plain = {
        name: digest
        for name, digest in file_hashes(folder).items()
        if name.endswith(("model.safetensors", *names)) or "/personal/" in name
    }
    sealed = [*folder.rglob("checkpoint-*.safetensors"), *folder.rglob("states/*/*.safetensors")]
    assert sealed and len(plain) > len(names)
    tensors = {
        str(path.relative_to(folder)): {n: t.tolist() for n, t in read_sealed(path).tensors.items()}
        for path in sealed
    }
    return plain | tensors


def trained(folder, device, observers=(), **changes):
    with without_report():
        config = CONFIG | {"device": device, "workers": 1 if device == "cpu" else "auto"} | changes
        nufed.run(config, out=folder, figures=None, observers=observers)
    return files(folder)


@pytest.mark.parametrize("engine", ["direct", "batched"])
def test_it_writes_what_the_cpu_writes(engine, tmp_path):
    right = trained(tmp_path / "cpu", "cpu", engine=engine)
    assert trained(tmp_path / NAME, NAME, engine=engine) == right
    inputs = torch.randint(0, 17, (12, 8, 8), generator=torch.Generator().manual_seed(1))
    labels = torch.arange(12) % 3
    there, here = (
        nufed.load_bundle(tmp_path / device / "bundles" / "exact.nufed").adapt(inputs, labels)
        for device in (NAME, "cpu")
    )
    for name, tensor in here.module.state_dict().items():
        assert torch.equal(there.module.state_dict()[name], tensor)


def test_it_resumes(tmp_path):
    class Kill(nufed.Observer):
        def round(self, event):
            if event.method == "ditto" and event.round == 2:
                raise Killed

    changes = {"checkpoint_every": 1, "rounds": 3, "methods": DITTO}
    right = trained(tmp_path / "whole", NAME, **changes)
    with pytest.raises(Killed):
        trained(tmp_path / "killed", NAME, [Kill()], **changes)
    with without_report():
        nufed.resume(tmp_path / "killed", figures=None)
    found = files(tmp_path / "killed")
    outcome = [n for n in right if n.endswith(("model.safetensors", "agents.jsonl"))]
    assert len(outcome) >= 3 and {n: found[n] for n in outcome} == {n: right[n] for n in outcome}


def test_auto_chooses_an_engine_that_runs_there(tmp_path):
    trained(tmp_path / NAME, NAME, engine="auto", methods=EXACT, rounds=1)


def test_every_aggregation_rule(tmp_path):
    methods = {rule: {"algorithm": "scaffold", "aggregation": rule} for rule in AGGREGATIONS}
    right = trained(tmp_path / "cpu", "cpu", methods=methods)
    assert trained(tmp_path / NAME, NAME, methods=methods) == right


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec(codec, tmp_path):
    changes = {"compression": {"codec": codec}, "methods": EXACT}
    right = trained(tmp_path / "cpu", "cpu", **changes)
    assert trained(tmp_path / NAME, NAME, **changes) == right


def test_the_gram_engine_says_that_it_needs_the_cpu(tmp_path):
    with pytest.raises(nufed.InputError, match="Gram space runs on the CPU only"):
        trained(tmp_path / NAME, NAME, engine="gram", methods=EXACT)
