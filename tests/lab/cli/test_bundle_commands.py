"""The commands that bundle, inspect, adapt and apply a meta-model."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nufed as library
from nufed.lab.readers.files import read_data
from support import without_report

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG = {
    "rounds": 6,
    "participation": 0.5,
    "workers": 1,
    "baselines": ["majority"],
    "data": {"agents": 8, "samples_per_agent": 40, "dirichlet": 0.1, "unseen_agents": 2},
    "model": {"args": {"hidden": [8], "activation": "tanh"}},
    "method": {"adapt_steps": 2, "adapt_lr": 0.1, "meta_lr": 0.2, "batch_size": 6},
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory with a finished run and a user's data."""
    cwd = tmp_path_factory.mktemp("work")
    library.run(CONFIG, out=cwd / "run")
    for name in ("my_digits.csv", "my_digits_new.csv"):
        (cwd / name).write_bytes((EXAMPLES / name).read_bytes())
    return cwd


def test_bundle_inspect_adapt_predict(work, nufed):
    made = nufed("bundle", "run", "--method", "gmeta", "--out", "b.nufed", cwd=work)
    assert made.returncode == 0 and "nufed inspect b.nufed" in made.stdout
    assert (work / "b.nufed").read_bytes() == (work / "run/bundles/gmeta.nufed").read_bytes()
    card = nufed("inspect", "b.nufed", cwd=work)
    assert "fine-tuning: 2 steps (ν)" in card.stdout and "Measured" in card.stdout
    adapted = nufed("adapt", "b.nufed", "my_digits.csv", "--out", "mine.safetensors", cwd=work)
    assert adapted.returncode == 0, adapted.stderr
    assert "35 samples, 2 fine-tuning steps" in adapted.stdout
    assert "on held-out samples: accuracy" in adapted.stdout
    options = ("--out", "answers.csv")
    said = nufed("predict", "mine.safetensors", "my_digits_new.csv", *options, cwd=work)
    assert said.returncode == 0 and "of 15, " in said.stdout
    with (work / "answers.csv").open() as file:
        answers = [row["answer"] for row in csv.DictReader(file)]
    with (work / "my_digits_new.csv").open() as file:
        labels = [row["label"] for row in csv.DictReader(file)]
    right = sum(a == b for a, b in zip(answers, labels, strict=True))
    assert f"right: {right} of 15" in said.stdout
    words = ("adapt", "b.nufed", "my_digits.csv", "--out", "mine.safetensors")
    words = (*words, "--steps", "auto", "--json")
    before = (work / "mine.safetensors").read_bytes()
    refused = nufed(*words, cwd=work)
    assert refused.returncode == 2 and "--force to overwrite it" in refused.stderr
    assert (work / "mine.safetensors").read_bytes() == before
    printed = nufed(*words, "--force", "--max-steps", "4", cwd=work)
    assert len(json.loads(printed.stdout)["report"]["curve"]) == 5
    assert json.loads(printed.stdout)["report"]["chosen"] is True


def test_adapt_writes_no_model_that_it_finds_harmed(work, nufed):
    words = ("adapt", "run/bundles/gmeta.nufed", "my_digits.csv", "--out", "harmed.safetensors")
    refused = nufed(*words, "--lr", "30", cwd=work)
    assert refused.returncode == 2 and not (work / "harmed.safetensors").exists()
    assert "adapting harms: on held-out samples the loss rises from" in refused.stderr
    assert "--anyway" in refused.stderr
    written = nufed(*words, "--lr", "30", "--anyway", cwd=work)
    assert written.returncode == 0 and "adapting harmed" in written.stdout
    assert (work / "harmed.safetensors").exists()


def test_a_personal_model_with_training_data_needs_a_flag(tmp_path, nufed):
    """And says what it holds; `predict` uses it."""
    tables = {"methods": {"knn": {"algorithm": "knn_per", "neighbours": 3}}, "baselines": []}
    own = {"meta_lr": 0.2, "batch_size": 6}
    with without_report():
        library.run({**CONFIG, **tables, "rounds": 1, "method": own}, out=tmp_path / "run")
    words = ("bundle", "run", "--method", "knn", "--agent", "3")
    refused = nufed(*words, cwd=tmp_path)
    assert refused.returncode == 2 and not list(tmp_path.glob("*.safetensors"))
    assert "features and labels of the agent's training samples" in refused.stderr
    assert "--with-training-data" in refused.stderr
    made = nufed(*words, "--with-training-data", cwd=tmp_path)
    assert made.returncode == 0
    assert "warning: knn-agent-3.safetensors holds features and labels of" in made.stdout
    said = nufed("predict", "knn-agent-3.safetensors", EXAMPLES / "my_digits_new.csv", cwd=tmp_path)
    assert said.returncode == 0 and "of 15, " in said.stdout


def test_npz_and_data_without_labels(work, nufed):
    rows = np.loadtxt(work / "my_digits.csv", delimiter=",", skiprows=1)
    np.savez(work / "mine.npz", inputs=rows[:, :-1], targets=rows[:, -1].astype(int))
    for data in ("my_digits.csv", "mine.npz"):
        out = f"{data}.safetensors"
        done = nufed("adapt", "run/bundles/gmeta.nufed", data, "--out", out, cwd=work)
        assert done.returncode == 0, done.stderr
    assert (work / "my_digits.csv.safetensors").read_bytes() == (
        work / "mine.npz.safetensors"
    ).read_bytes()
    lines = (work / "my_digits_new.csv").read_text().splitlines()
    bare = "\n".join(line.rsplit(",", 1)[0] for line in lines)
    (work / "bare.csv").write_text(bare)
    said = nufed("predict", "mine.npz.safetensors", "bare.csv", "--json", cwd=work)
    found = json.loads(said.stdout)
    assert len(found["predictions"]) == 15 and found["labels"] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("a,label\n", "it is empty"),
        ("a,b\n1,2\n", "no column 'label'"),
        ("a,label,label\n1,2,3\n", "2 columns 'label'"),
        ("a,label\n1,2,3\n", "line 2 has 3 values, the header has 2"),
        ("a,label\nx,2\n", "line 2, column 'a' has 'x', not a finite number"),
        ("a,label\n,2\n", "line 2, column 'a' is empty"),
        ("a,label\n1,2\n", "1 numbers, and this model takes 64"),
        ("p\nlabel\n", "no column 'label'"),
        (
            ",".join(f"p{i}" for i in range(64)) + ",label\n" + "nan," * 64 + "3\n",
            "column 'p0' has 'nan'",
        ),
        (",".join(f"p{i}" for i in range(64)) + ",label\n" + "1," * 64 + "3\n", "1 sample"),
        (",".join(f"p{i}" for i in range(64)) + ",label\n" + ("1," * 64 + "x\n") * 3, "label 'x'"),
        (",".join(f"p{i}" for i in range(64)) + ",label\n" + ("0.5," * 64 + "1\n") * 3, "itself"),
        ('a,label\n"1,2\n', "can't be used"),
    ],
)
def test_bad_csv_is_one_sentence(work, text, words):
    bundle = library.load_bundle(work / "run/bundles/gmeta.nufed")
    (work / "bad.csv").write_text(text)
    with pytest.raises(library.InputError, match=words):
        given = read_data(work / "bad.csv")
        bundle.adapt(given.inputs, given.labels)


def test_predict_names_a_sample_that_is_not_finite(work, nufed):
    library.load_bundle(work / "run/bundles/gmeta.nufed").unadapted().save(work / "as.safetensors")
    inputs = np.ones((3, 64))
    for bad, words in ((np.nan, "input of sample 1 "), (np.inf, "input of sample 1 ")):
        inputs[1, 5] = bad
        np.savez(work / "bad.npz", inputs=inputs, targets=[0, 1, 2])
        said = nufed("predict", "as.safetensors", "bad.npz", cwd=work)
        assert said.returncode == 2 and words in said.stderr and not said.stdout
    np.savez(work / "bad.npz", inputs=np.ones((3, 64)), targets=[0, 1, np.nan])
    said = nufed("predict", "as.safetensors", "bad.npz", cwd=work)
    assert said.returncode == 2 and "target of sample 2 " in said.stderr


def test_odd_class_names_are_printed_as_text_and_no_formulas_in_csv(tmp_path, nufed):
    classes = ("[/b]yes", "[b]", "\x1b[2J\u202e", "=1+1")
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 4))
    torch.nn.init.eye_(module[1].weight)
    build = {"build": "logistic", "args": {"input_shape": [4], "outputs": 4}}
    bundle = library.Bundle.of(module, **build, input_shape=(4,), adapt_lr=0.1, classes=classes)
    bundle.save(tmp_path / "b.nufed")
    bundle.unadapted().save(tmp_path / "as.safetensors")
    np.savez(tmp_path / "x.npz", inputs=9 * np.eye(4), targets=np.arange(4))
    for call in (("inspect", "b.nufed"), ("predict", "as.safetensors", "x.npz", "--out", "p.csv")):
        said = nufed(*call, cwd=tmp_path)
        assert said.returncode == 0, said.stderr
        assert all(sign.isprintable() or sign == "\n" for sign in said.stdout)
        for shown in ("[/b]yes", "[b]", r"\x1b[2J\u202e", "=1+1"):
            assert shown in said.stdout
    with (tmp_path / "p.csv").open(newline="") as file:
        answers = [row["answer"] for row in csv.DictReader(file)]
    assert answers == ["[/b]yes", "[b]", "\x1b[2J\u202e", "'=1+1"]
    rows = "".join(f"{n},0,0,0,{cell}\n" for n, cell in enumerate(answers))
    (tmp_path / "back.csv").write_text("a,b,c,d,label\n" + rows)
    said = nufed("predict", "as.safetensors", "back.csv", cwd=tmp_path)
    assert said.returncode == 0 and "of 4, " in said.stdout
    (tmp_path / "odd.csv").write_text("\x1b[2J,[/b]\n1,2\n")
    said = nufed("adapt", "b.nufed", "odd.csv", "--out", "no.safetensors", cwd=tmp_path)
    (line,) = said.stderr.splitlines()
    assert said.returncode == 2 and line.isprintable() and "[/b]" in line


def test_bad_files_exit_with_one_sentence_and_write_nothing(work, nufed):
    np.savez(work / "object.npz", inputs=np.array([{}, {}], dtype=object), targets=[0, 1])
    np.savez(work / "half.npz", inputs=np.zeros((2, 64)))
    (work / "binary.csv").write_bytes(b"\xff\xfe\x00")
    good = "run/bundles/gmeta.nufed"
    calls = [
        (("adapt", good, "nowhere.csv", "--out", "no.safetensors"), "No such file"),
        (("adapt", good, "object.npz", "--out", "no.safetensors"), "not an NPZ file of numbers"),
        (("adapt", good, "half.npz", "--out", "no.safetensors"), "no array 'targets'"),
        (("adapt", good, "binary.csv", "--out", "no.safetensors"), "can't be used"),
        (("adapt", "my_digits.csv", good, "--out", "no.safetensors"), "can't be used as a bundle"),
        (("adapt", good, "my_digits.csv", "--out", "no.txt"), "must end in .safetensors"),
        (("adapt", good, "my_digits.csv", "--out", "no.safetensors", "--steps", "x"), "--steps x"),
        (("predict", good, "my_digits.csv"), "can't be used as an adapted model"),
        (("bundle", "run", "--method", "x", "--out", "no.nufed"), "must be one of gmeta"),
        (("inspect", "nowhere.nufed"), "is not a file"),
        (("advise", "nowhere"), "can't be read as a run directory"),
    ]
    for arguments, words in calls[:2]:  # the command line itself; the others as it calls them
        result = nufed(*arguments, cwd=work)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
        assert words in result.stderr
    from typer.testing import CliRunner

    from nufed.lab.cli import app

    for arguments, words in calls:
        paths = [str(work / a) if "." in a and not a.startswith("-") else a for a in arguments]
        paths = [str(work / "run") if a == "run" else a for a in paths]
        result = CliRunner().invoke(app, paths)
        assert isinstance(result.exception, library.NufedError), (arguments, result.output)
        assert words in str(result.exception)
    assert not list(work.glob("no.*"))


TOKENS = """
import numpy as np
import torch.nn.functional as F
from torch import nn


def data():
    tokens = np.random.default_rng(0).integers(0, 7, (160, 6))
    return tokens[:, :-1], (tokens[:, 1:] + tokens[:, :-1]) % 7, np.repeat(range(8), 20)


def model():
    return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))


def loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
"""


def test_sequences_of_tokens_from_training_to_onnx(tmp_path, nufed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens.py").write_text(TOKENS)
    config = {
        "rounds": 2,
        "workers": 1,
        "baselines": ["local"],
        "loss": "tokens:loss",
        "data": {"source": "tokens:data", "validation": 0.2},
        "model": {"name": "tokens:model"},
        "method": {"batch_size": 6, "adapt_lr": 0.5},
    }
    library.run(config, out="run")
    bundle = library.load_bundle("run/bundles/gmeta.nufed", trust=True)
    assert bundle.about.target_dtype == "int64"
    inputs, targets, _ = sys.modules["tokens"].data()
    adapted = bundle.adapt(inputs, targets, steps=2)
    after = adapted.report.curve[-1].loss
    assert np.isfinite(after) and after != adapted.report.before.loss
    with pytest.raises(library.InputError, match=r"targets range from 0.5 to 6.5: this model was"):
        bundle.adapt(inputs, targets + 0.5)
    np.savez("mine.npz", inputs=inputs, targets=targets)
    np.save("new.npy", inputs[:3])
    for call in (
        ("adapt", "run/bundles/gmeta.nufed", "mine.npz", "--steps", "2", "--out", "m.safetensors"),
        ("predict", "m.safetensors", "mine.npz"),
        ("export", "m.safetensors", "--to", "onnx"),
    ):
        done = nufed(*call, "--trust", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    said = nufed("predict", "m.safetensors", "new.npy", "--trust", "--json", cwd=tmp_path)
    answers = [answer["answer"] for answer in json.loads(said.stdout)["predictions"]]
    expected = adapted.module(torch.tensor(inputs[:3])).flatten(1)
    torch.testing.assert_close(torch.tensor(answers), expected.detach())
    session = pytest.importorskip("onnxruntime").InferenceSession("m.onnx")
    (found,) = session.run(None, {"inputs": inputs[:3]})
    torch.testing.assert_close(torch.tensor(found).flatten(1), torch.tensor(answers))
