"""Exported models give nufed's predictions without nufed."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import nufed as library
from nufed.lab.bundle import Adapted
from nufed.lab.bundle.about import PersonalAbout
from nufed.lab.export.model_files import write_onnx, write_state_dict
from nufed.models import MODELS

CLASSES = ("cat", "dog", "=1+1")
SHAPE = (2, 3)

# what a user without nufed writes
ELSEWHERE = """
import json, sys
import numpy as np, onnx, onnxruntime, torch
from safetensors.torch import load_file

x = np.load("x.npy")
session = onnxruntime.InferenceSession("model.onnx")
props = {p.key: json.loads(p.value) for p in onnx.load("model.onnx").metadata_props}
found = {"onnx": [session.run(None, {"inputs": x[:n]})[0].tolist() for n in (1, len(x))],
         "classes": props["classes"]}

about = json.load(open("plain.json"))
module = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)
)
module.load_state_dict(load_file("plain.safetensors"))
inputs = torch.tensor(x) * about["inputs"]["scale"] + about["inputs"]["shift"]
with torch.no_grad():
    found["torch"] = module(inputs).tolist()
found["names"] = about["classes"]
assert not [name for name in sys.modules if name.startswith("nufed")]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def bundle():
    torch.manual_seed(0)
    args = {"input_shape": list(SHAPE), "outputs": 3, "hidden": [4], "activation": "tanh"}
    module = MODELS["fcnn"](**args)
    return library.Bundle.of(
        module,
        build="fcnn",
        args=args,
        input_shape=SHAPE,
        input_dtype="uint8",
        scale=1 / 16,
        shift=-0.5,
        adapt_lr=0.5,
        classes=CLASSES,
    )


@pytest.fixture(scope="module")
def work(bundle, tmp_path_factory):
    """A directory with a bundle, an adapted model, and inputs as bytes."""
    cwd = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 17, (12, *SHAPE)).astype(np.uint8), rng.integers(0, 3, 12)
    np.save(cwd / "x.npy", x)
    bundle.save(cwd / "b.nufed")
    bundle.adapt(x, y, steps=3).save(cwd / "mine.safetensors")
    return cwd


def test_predictions_without_nufed_are_those_with_it(work, nufed):
    for call in (("onnx", "model.onnx"), ("state_dict", "plain.safetensors")):
        said = nufed("export", "mine.safetensors", "--to", call[0], "--out", call[1], cwd=work)
        assert said.returncode == 0, said.stderr
        assert call[1] in said.stdout
    mine = library.load_adapted(work / "mine.safetensors")
    done = subprocess.run(
        [sys.executable, "-I", "-c", ELSEWHERE],
        cwd=work,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    x = torch.from_numpy(np.load(work / "x.npy"))
    with torch.no_grad():
        right = mine.module(x)
    one, every = found["onnx"]
    for given, wanted in ((one, right[:1]), (every, right), (found["torch"], right)):
        assert torch.allclose(torch.tensor(given), wanted, atol=1e-5)
    assert found["classes"] == found["names"] == list(CLASSES)
    assert torch.tensor(every).argmax(dim=1).tolist() == [
        CLASSES.index(p.answer) for p in mine.predict(x)
    ]
    unadapted = library.load_bundle(work / "b.nufed").unadapted()
    with torch.no_grad():
        assert not torch.allclose(torch.tensor(every), unadapted.module(x), atol=1e-2)


def test_a_bundle_is_its_global_model(work, bundle, nufed):
    said = nufed("export", "b.nufed", "--to", "state_dict", cwd=work)
    assert said.returncode == 0, said.stderr
    found, right = load_file(work / "b.safetensors"), bundle.module.state_dict()
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], right[name]) for name in right)
    again = nufed("export", "b.nufed", "--to", "state_dict", cwd=work)
    assert again.returncode == 2 and "is not overwritten" in again.stderr


def test_code_that_a_file_names_needs_trust(tmp_path, nufed):
    (tmp_path / "their_model.py").write_text(
        "import torch\n\ndef make(width):\n    open('was-imported', 'w').close()\n"
        "    return torch.nn.Linear(width, 2)\n"
    )
    bundle = library.Bundle.of(
        nn.Linear(3, 2),
        build="their_model:make",
        args={"width": 3},
        input_shape=(3,),
        adapt_lr=0.1,
        classes=("a", "b"),
    )
    bundle.save(tmp_path / "theirs.nufed")
    call = ("export", "theirs.nufed", "--to", "state_dict")
    refused = nufed(*call, cwd=tmp_path)
    assert refused.returncode == 2 and "--trust" in refused.stderr
    card = nufed("inspect", "theirs.nufed", cwd=tmp_path)
    assert card.returncode == 0 and "their_model:make(width=3)" in card.stdout
    assert "was not built, as that imports their_model:make" in card.stderr
    assert json.loads(nufed("inspect", "theirs.nufed", "--json", cwd=tmp_path).stdout)["classes"]
    assert not (tmp_path / "was-imported").exists()
    allowed = nufed(*call, "--trust", cwd=tmp_path)
    assert allowed.returncode == 0, allowed.stderr
    assert (tmp_path / "was-imported").exists()
    assert nufed("inspect", "theirs.nufed", "--trust", cwd=tmp_path).stderr == ""


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("b.nufed", "--to", "csv"), "b.nufed is a file, so onnx or state_dict"),
        (("b.nufed", "--to", "onnx", "--out", "b.pt"), "must end in .onnx"),
        (("b.nufed", "--to", "onnx", "--method", "gmeta"), "leave out --method"),
        (("x.npy", "--to", "onnx"), "can't be read as a bundle or an adapted model"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_sentence(work, nufed, call, words):
    said = nufed("export", *call, cwd=work)
    assert said.returncode == 2 and words in said.stderr and len(said.stderr.splitlines()) == 1


def test_a_model_that_only_nufed_can_use_is_refused(tmp_path, bundle):
    personal = PersonalAbout(algorithm="knn_per", settings={}, training_data=None)
    adapted = bundle.unadapted()
    model = Adapted(adapted.about.model_copy(update={"personal": personal}), adapted.module, None)
    for write, name in ((write_onnx, "m.onnx"), (write_state_dict, "m.safetensors")):
        with pytest.raises(library.InputError, match="more than a module: 'knn_per'"):
            write(model, tmp_path / name)
