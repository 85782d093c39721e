"""Bundles of models whose base is frozen, of models of transformers, and of several inputs."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import nufed
from nufed import InputError
from nufed.lab.bundle.bundle import read_card
from nufed.lab.bundle.from_run import make_bundle, make_personal
from nufed.lab.cli import main
from nufed.lab.files import unseal
from nufed.lab.pretrained import architecture_of, pretrained, tokens
from nufed.lab.runs import load_run
from support import without_report

transformers = pytest.importorskip("transformers", reason='needs pip install "nufed[hf]"')
pytest.importorskip("peft", reason='needs pip install "nufed[peft]"')
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY = {**SIZES, "intermediate_size": 24, "vocab_size": len(WORDS), "max_position_embeddings": 16}
TEXTS = [f"{letter} {other}" for letter in "abc" for other in "defghijklmnopqrs"]
LABELS = [i for i in range(3) for _ in range(16)]


def model_folder(folder, seed=0):
    torch.manual_seed(seed)
    transformers.BertModel(transformers.BertConfig(**TINY)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same architecture with other weights."""
    return model_folder(tmp_path_factory.mktemp("other"), seed=1)


def data_of(folder):
    order = np.random.default_rng(0).permutation(len(TEXTS))
    inputs = tokens([TEXTS[i] for i in order], str(folder), 8)
    return inputs, np.array(LABELS)[order], np.arange(len(TEXTS)) % 2


@pytest.fixture(scope="module")
def runs(bert, tmp_path_factory):
    """Runs of the tiny BERT by what is trained of it."""
    made = {}
    for train in ("lora", "head", "all"):
        lora = {"lora": {"rank": 2, "targets": ["query"], "freeze_a": True}}
        config = {
            "rounds": 3,
            "baselines": [],
            "workers": 1,
            "engine": "direct",
            "data": {"test": 0.25},
            "model": {"name": f"hf:{bert}", "train": train, **(lora if train == "lora" else {})},
            "method": {"batch_size": 6, "local_steps": 2, "meta_lr": 0.5, "adapt_lr": 0.5},
            "methods": {"gmeta": {"curvature": "first_order"}},
        }
        out = tmp_path_factory.mktemp("runs") / train
        with without_report():
            nufed.run(config, data=data_of(bert), out=out, figures=None)
        made[train] = out
    return made


def bundle_file(run):
    return run / "bundles/gmeta.nufed"


def table(folder, texts=TEXTS, labels=LABELS):
    with (folder / "texts.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows(zip(texts, labels, strict=True))
    return folder / "texts.csv"


def call(*words):
    with pytest.raises(SystemExit) as done, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["nufed", *map(str, words)])
        main()
    return done.value.code or 0


def test_a_bundle_names_its_base_and_holds_the_trained_part_alone(runs, bert):
    about, card = read_card(bundle_file(runs["lora"]))
    base = about.model.base
    assert base.name == str(bert) and not base.carried and base.revision is None
    frozen = pretrained(str(bert), 3)
    whole = sum(p.numel() for n, p in frozen.named_parameters() if "classifier" not in n)
    assert base.parameters == whole
    assert base.sha256[:12] in card and "not in this file" in card and f"{whole:,} frozen" in card
    held = unseal(bundle_file(runs["lora"]).read_bytes()).tensors
    # A is frozen, but not the base's
    assert {n.split(".")[-3] for n in held if "lora" in n} == {"lora_A", "lora_B"}
    assert {n for n in held if "lora" not in n} == {
        "model.classifier.weight",
        "model.classifier.bias",
    }


@pytest.mark.parametrize("train", ["lora", "head", "all"])
def test_a_bundle_adapts_and_its_model_predicts_texts(runs, tmp_path, capsys, train):
    file, out = bundle_file(runs[train]), tmp_path / "mine.safetensors"
    assert call("inspect", file) == 0
    assert call("adapt", file, table(tmp_path), "--out", out, "--steps", 8, "--anyway") == 0
    assert call("predict", out, table(tmp_path), "--json") == 0
    answers = json.loads(capsys.readouterr().out.splitlines()[-1])
    mine = [a["answer"] for a in answers["predictions"]]
    assert len(mine) == len(TEXTS) and set(mine) <= {"0", "1", "2"}
    assert answers["labels"] == [str(label) for label in LABELS]
    bundle = nufed.load_bundle(file)
    again = bundle.adapt(bundle.about.tokens(TEXTS), LABELS, steps=8, anyway=True)
    assert [p.answer for p in again.predict(bundle.about.tokens(TEXTS))] == mine
    changed = again.module.model.state_dict()
    before = bundle.module.state_dict()
    moved = {n for n in before if not torch.equal(before[n], changed[n])}
    trained = {n for n, p in bundle.module.named_parameters() if p.requires_grad}
    assert moved and moved <= trained


def test_arrays_by_name_are_taken_too(runs, tmp_path, capsys):
    encoded = nufed.load_bundle(bundle_file(runs["lora"])).about.tokens(TEXTS)
    arrays = {name: x.numpy() for name, x in encoded.items()}
    np.savez(tmp_path / "mine.npz", **arrays, targets=np.array(LABELS))
    out = tmp_path / "mine.safetensors"
    words = [bundle_file(runs["lora"]), tmp_path / "mine.npz", "--out", out, "--anyway"]
    assert call("adapt", *words) == 0
    del arrays["attention_mask"]
    np.savez(tmp_path / "less.npz", **arrays)
    assert call("predict", out, tmp_path / "less.npz") == 2
    assert "it has no array 'attention_mask'" in " ".join(capsys.readouterr().err.split())


def test_another_base_is_refused(runs, other, tmp_path, capsys):
    file = bundle_file(runs["lora"])
    with pytest.raises(InputError, match=r"and that of .* is another") as refused:
        nufed.load_bundle(file, base=str(other))
    assert "\n" not in str(refused.value)
    out = tmp_path / "mine.safetensors"
    assert call("adapt", file, table(tmp_path), "--out", out, "--base", other) == 2
    assert "is another (SHA-256" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
    with pytest.raises(InputError, match="and that of the given module is another"):
        nufed.load_bundle(file, module=pretrained(str(other), 3))


def test_a_base_that_is_elsewhere_now(runs, bert, tmp_path):
    """A folder that is no longer there is named in one sentence, with the way out."""
    moved = tmp_path / "moved"
    shutil.copytree(bert, moved)
    bundle = nufed.load_bundle(bundle_file(runs["lora"]))
    gone = bundle.about.model.base.model_copy(update={"name": "gone/away"})
    model = bundle.about.model.model_copy(update={"base": gone})
    about = bundle.about.model_copy(update={"model": model})
    file = nufed.lab.bundle.Bundle(about, bundle.module, bundle.loss).save(tmp_path / "b.nufed")
    with pytest.raises(InputError, match=r"nufed data get hf:gone/away.*--base") as missing:
        nufed.load_bundle(file)
    assert "\n" not in str(missing.value)
    again = nufed.load_bundle(file, base=str(moved))
    inputs = bundle.about.tokens(TEXTS[:4])
    assert torch.equal(again.module(**inputs), bundle.module(**inputs))


@pytest.mark.parametrize("train", ["lora", "head"])
def test_a_bundle_that_carries_its_base_needs_no_folder(runs, tmp_path, monkeypatch, train):
    run = load_run(runs[train])
    named = nufed.load_bundle(bundle_file(runs[train]))
    file = make_bundle(run, "gmeta", carry_base=True).save(tmp_path / "whole.nufed")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)  # nothing is read
    whole = nufed.load_bundle(file)
    assert whole.about.model.base.carried and "in this file" in whole.card
    assert whole.about.model.base.sha256 == named.about.model.base.sha256
    inputs = named.about.zeros(2)
    assert torch.equal(whole.module(**inputs), named.module(**inputs))
    assert file.stat().st_size > 5 * bundle_file(runs[train]).stat().st_size
    with pytest.raises(InputError, match="it needs no base model"):
        nufed.load_bundle(file, base="any")
    adapted = whole.adapt(inputs, [0, 1], anyway=True).save(tmp_path / "mine.safetensors")
    nufed.load_adapted(adapted).predict(inputs)


def test_crafted_sizes_are_refused_before_anything_is_allocated(runs, tmp_path):
    bundle = make_bundle(load_run(runs["lora"]), "gmeta", carry_base=True)
    huge = {**bundle.about.model.architecture, "vocab_size": 2**40}
    model = bundle.about.model.model_copy(update={"architecture": huge})
    crafted = nufed.lab.bundle.Bundle(
        bundle.about.model_copy(update={"model": model}), bundle.module, bundle.loss
    ).save(tmp_path / "crafted.nufed")
    with pytest.raises(InputError, match="do not match the module"):
        nufed.load_bundle(crafted)


@pytest.mark.parametrize("carried", [None, True])
def test_a_personal_model_names_or_carries_its_base(runs, bert, other, tmp_path, carried):
    run = load_run(runs["lora"])
    personal = make_personal(run, "gmeta", 0, data=data_of(bert), carry_base=carried)
    file = personal.save(tmp_path / "mine.safetensors")
    inputs = personal.about.tokens(TEXTS[:5])
    again = nufed.load_adapted(file)
    assert again.predict(inputs) == personal.predict(inputs)
    said = "it needs no base model" if carried else "is another"
    with pytest.raises(InputError, match=said):
        nufed.load_adapted(file, base=str(other))


def test_an_export_follows_the_same_rule(runs, other, tmp_path, capsys):
    file, out = bundle_file(runs["lora"]), tmp_path / "whole.safetensors"
    assert call("export", file, "--to", "state_dict", "--out", out) == 0
    bundle = nufed.load_bundle(file)
    assert load_file(out).keys() == bundle.module.state_dict().keys()
    about = json.loads((tmp_path / "whole.json").read_text())
    assert about["inputs"].keys() == {*bundle.about.names}
    for words, said in (
        (["onnx"], "takes several inputs (input_ids"),
        (["state_dict", "--base", other], "is another (SHA-256"),
    ):
        assert call("export", file, "--to", *words) == 2
        assert said in " ".join(capsys.readouterr().err.split())


class Two(nn.Module):
    """Takes two arrays by position, the first as bytes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(2, 3, bias=False)

    def forward(self, a, b):
        return self.first(a.flatten(1)) + self.second(b)


def test_inputs_by_position(tmp_path):
    rng = np.random.default_rng(0)
    a = rng.integers(0, 255, (48, 2, 2), dtype=np.uint8)
    b = rng.random((48, 2), dtype=np.float32)
    y = (a[:, 0, 0] > 120).astype(int) + (b[:, 0] > 0.5)
    samples = nufed.Samples(
        (torch.from_numpy(a), torch.from_numpy(b)), torch.from_numpy(y), ("0", "1", "2"), scale=0.01
    )
    config = {
        "rounds": 2,
        "baselines": [],
        "workers": 1,
        "data": {"agents": 2, "partition": "iid", "test": 0.25},
        "method": {"batch_size": 6},
        "methods": {"gmeta": {}},
    }
    with without_report():
        run = nufed.run(config, data=samples, model=Two, out=tmp_path / "run", figures=None)
    bundle = nufed.load_bundle(bundle_file(run.path), module=Two())
    assert bundle.about.names == ["0", "1"] and bundle.about.model.base is None
    adapted = bundle.adapt((a, b), y, anyway=True)
    answers = [p.answer for p in adapted.predict((a, b))]
    outputs = adapted.module(torch.from_numpy(a), torch.from_numpy(b))
    assert answers == [str(n) for n in outputs.argmax(dim=1).tolist()]
    adapted.save(tmp_path / "mine.safetensors")
    again = nufed.load_adapted(tmp_path / "mine.safetensors", module=Two())
    assert [p.answer for p in again.predict((a, b))] == answers
    for given, said in (
        (a, "a tuple of 2 arrays"),
        ({"0": a, "1": b}, "a tuple of 2 arrays, and was given 0, 1"),
        ((a, b[:, :1]), "input '1': every sample has 1 numbers, and this model takes 2"),
        ((a, b[:4]), "there are 4 rows of input 1 and 48 targets"),
    ):
        with pytest.raises(InputError, match=said):
            bundle.adapt(given, y)


def test_the_architecture_holds_no_path_of_this_machine(bert):
    architecture = architecture_of(pretrained(str(bert), 3))
    assert architecture["model_type"] == "bert" and str(bert) not in json.dumps(architecture)
    assert architecture_of(nn.Linear(1, 1)) is None


@pytest.mark.parametrize("part", ["head", "none, *.bias"])
def test_a_frozen_part_of_any_module_is_carried(tmp_path, part):
    samples = nufed.data.digits()
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    config = {
        "rounds": 1,
        "baselines": [],
        "workers": 1,
        "data": {"agents": 4},
        "model": {"train": part},
        "method": {"batch_size": 4},
        "methods": {"gmeta": {}},
    }
    with without_report():
        run = nufed.run(config, model=module, out=tmp_path / "run", figures=None)
    bundle = nufed.load_bundle(bundle_file(run.path), module=nn.Sequential(*module))
    base = bundle.about.model.base
    assert base.carried and base.name is None and base.parameters < 64 * 8 + 8 + 80 + 10
    adapted = bundle.adapt(samples.inputs[:20], samples.targets[:20], anyway=True)
    assert adapted.predict(samples.inputs[:2])
