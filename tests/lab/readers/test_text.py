"""Texts as windows of tokens: the roles of plays, own folders, and a run that predicts them."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import nufed
from nufed import InputError, load_run
from nufed.data import given
from nufed.data.text import next_token_loss, windows
from nufed.lab.readers import sources
from nufed.lab.readers.sources import SHAKESPEARE, SOURCES, shakespeare
from nufed.lab.readers.text import roles
from support import without_report

WORDS = {"ANN": "to be or not ", "BOB": "that is the question ", "EVE": "whether nobler in "}


@pytest.fixture
def folder(tmp_path):
    """A text per agent, each repeating its own words."""
    (tmp_path / "texts").mkdir()
    for name, words in WORDS.items():
        (tmp_path / f"texts/{name}.txt").write_text(words * 20)
    return tmp_path / "texts"


def test_no_token_is_predicted_twice_and_every_target_follows_its_input():
    tokens = {"a": list(range(100)), "b": list(range(200, 233))}
    samples = windows(tokens, length=8, least=4)
    assert samples.owners.tolist() == ["a"] * 12 + ["b"] * 4 and samples.classes == ()
    assert (samples.targets == samples.inputs + 1).all()
    assert len(samples.targets.unique()) == samples.targets.numel()
    assert set(windows(tokens, length=8, least=5).owners) == {"a"}
    with pytest.raises(InputError, match="no text has 13 windows of 8 tokens: lower"):
        windows(tokens, length=8, least=13)
    with pytest.raises(InputError, match="length = 0: must be a whole number, at least 1"):
        windows(tokens, length=0)


def test_roles_say_what_follows_their_names():
    play = "A:\nOne\n\n\nB:\nTwo:\nthree\n\nA:\nfour\n\nExeunt\n"  # as in the file, two blank lines
    assert roles(play) == {"A": "One\nfour", "B": "Two:\nthree"}


def test_the_loss_skips_ignored_targets_and_wants_an_output_per_token():
    outputs = torch.randn(2, 3, 5)
    targets = torch.tensor([[0, 1, -100], [4, -100, -100]])
    right = torch.nn.functional.cross_entropy(
        torch.stack([outputs[0, 0], outputs[0, 1], outputs[1, 0]]), torch.tensor([0, 1, 4])
    )
    torch.testing.assert_close(next_token_loss(outputs, targets), right)
    with pytest.raises(InputError, match=r"model.args.next_token = true"):
        next_token_loss(outputs[:, 0], targets)


def test_a_folder_of_texts(folder):
    samples = SOURCES["text"](path=str(folder), length=10, least=5)
    rows, names = given(samples.owners)
    assert names == ("ANN", "BOB", "EVE")
    alphabet = sorted(set("".join(WORDS.values())))
    for own, words in zip(rows, WORDS.values(), strict=True):
        line = "".join(alphabet[i] for i in samples.inputs[own].flatten())
        assert line == (words * 20)[: len(line)]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda at: at.joinpath("EVE.txt").write_bytes(b"\xff\xfe\xff"), "EVE.txt .* UTF-8"),
        (lambda at: [each.unlink() for each in at.iterdir()], "holds no .txt file"),
        (lambda at: at.joinpath("DIR.txt").mkdir(), "DIR.txt can't be used: it is not a regular"),
    ],
)
def test_folders_that_are_refused(change, sentence, folder):
    change(folder)
    with pytest.raises(InputError, match=sentence):
        SOURCES["text"](path=str(folder))


def test_bad_arguments_and_sizes(folder, monkeypatch):
    for arguments, sentence in (
        ({}, "data.args.path = '': must name a folder"),
        ({"path": "/nowhere"}, "data.args.path = '/nowhere': is not a folder"),
        ({"path": str(folder), "least": 99}, "no text has 99 windows of 80"),
        ({"path": str(folder), "tokenizer": 3}, "data.args.tokenizer = 3: must be text"),
    ):
        with pytest.raises(InputError, match=sentence):
            SOURCES["text"](**arguments)
    monkeypatch.setenv("NUFED_DATA_LIMIT", "20000")
    with pytest.raises(InputError, match=r"BOB.txt can't be used: .* is the limit"):
        SOURCES["text"](path=str(folder))


def test_a_tokenizer_is_read_locally(folder, monkeypatch):
    """A stand-in for transformers, whose tokens are words."""
    asked = {}

    def read(place, **settings):
        asked.update(settings, place=place)
        if place == "bad":
            raise OSError("no such tokenizer\nin the cache")
        numbers: dict[str, int] = {}
        return lambda text, **_: {
            "input_ids": [numbers.setdefault(word, len(numbers)) for word in text.split()]
        }

    stand_in = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=read))
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    samples = SOURCES["text"](path=str(folder), length=4, least=5, tokenizer="mine")
    assert asked["place"] == "mine" and asked["local_files_only"]
    assert not asked["trust_remote_code"]
    assert samples.inputs[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"the tokenizer 'bad' can't be read .*no such tokenizer"):
        SOURCES["text"](path=str(folder), tokenizer="bad")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r'needs transformers: pip install "nufed\[hf\]"'):
        SOURCES["text"](path=str(folder), tokenizer="mine")


SETTINGS = {
    "data": {"source": "text", "validation": 0.2, "test": 0.3, "unseen": ["EVE"]},
    "model": {"name": "gru", "args": {"hidden": [8], "vocabulary": 17, "next_token": True}},
    "rounds": 3,
    "participation": 1.0,
    "eval_steps": 2,
    "method": {"batch_size": 4, "meta_lr": 1.0, "local_steps": 5},
    "methods": {
        "fedavg": {"adapt_lr": 0.5},
        "gmeta": {"adapt_steps": 2, "adapt_lr": 0.5, "curvature": "exact"},
    },
}


def test_a_run_predicts_next_characters(folder, tmp_path):
    """It learns, is scored by perplexity, of which less is better, and ships models."""
    args = {"path": str(folder), "length": 10, "least": 5}
    config = {**SETTINGS, "data": {**SETTINGS["data"], "args": args}}
    with without_report():
        nufed.run(config, out=tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.measure.name == "perplexity" and not run.measure.higher_is_better
    rows = {(row.group, row.name): row.personal.mean for row in run.rows()}
    assert 1 < rows["seen", "gmeta"] < 16 and rows["seen", "gmeta"] < rows["seen", "untrained"]
    bundle = nufed.load_bundle(tmp_path / "run/bundles/gmeta.nufed")
    assert bundle.about.loss == "next_token"
    tokens = SOURCES["text"](**args)
    adapted = bundle.adapt(tokens.inputs[:20], tokens.targets[:20], steps=2)
    assert len(adapted.predict(tokens.inputs[:3])) == 3


def test_bits_per_character_of_a_run(folder, tmp_path):
    args = {"path": str(folder), "length": 10, "least": 5}
    config = {**SETTINGS, "data": {**SETTINGS["data"], "args": args}, "rounds": 1}
    with without_report():
        for metric in ("perplexity", "bits_per_character"):
            nufed.run({**config, "metric": metric}, out=tmp_path / metric)
    of = {
        metric: next(row for row in load_run(tmp_path / metric).rows() if row.name == "gmeta")
        for metric in ("perplexity", "bits_per_character")
    }
    bits = of["bits_per_character"]
    assert bits.personal.mean == pytest.approx(bits.loss / np.log(2), rel=1e-6)
    # the mean over agents of 2^bits is at least 2^mean
    assert of["perplexity"].personal.mean >= 2**bits.personal.mean
    with pytest.raises(InputError, match='metric = "accuracy": this data has no classes'):
        nufed.run({**config, "metric": "accuracy"}, out=tmp_path / "x")
    with pytest.raises(InputError, match=r"set\s+model.args.vocabulary to the number"):
        small = {"hidden": [8], "vocabulary": 5, "next_token": True}
        nufed.run({**config, "model": {"name": "gru", "args": small}}, out=tmp_path / "y")


def test_shakespeare_from_a_stored_file(tmp_path, monkeypatch):
    monkeypatch.setenv("NUFED_DATA", str(tmp_path))
    with pytest.raises(InputError, match="`nufed data get shakespeare`"):
        shakespeare()
    (tmp_path / "tinyshakespeare").mkdir()
    path = tmp_path / "tinyshakespeare/input.txt"
    path.write_text("\n\n".join(f"{name}:\n{words * 9}" for name, words in WORDS.items()))
    with pytest.raises(InputError, match="not the official file"):
        shakespeare()
    known = replace(SHAKESPEARE, files={"tinyshakespeare/input.txt": ""})
    monkeypatch.setattr(sources, "SHAKESPEARE", known)
    assert set(shakespeare(length=20, least=5).owners) == set(WORDS)


def test_the_real_shakespeare(real_data):
    if SHAKESPEARE.missing():
        pytest.skip("set NUFED_DATA to a directory made by `nufed data get shakespeare`")
    samples = shakespeare()
    assert len(set(samples.owners)) == 99 and len(samples) == 11_418
    assert int(samples.inputs.max()) < 65 and "ROMEO" in set(samples.owners)


def test_the_preset_runs_on_a_stand_in(tmp_path, monkeypatch):
    """Ten roles, two of which are unseen."""
    (tmp_path / "tinyshakespeare").mkdir()
    said = [f"ROLE {n}:\n{' '.join(WORDS.values()) * 2}" for n in range(10)]
    (tmp_path / "tinyshakespeare/input.txt").write_text("\n\n".join(said))
    monkeypatch.setenv("NUFED_DATA", str(tmp_path))
    known = replace(SHAKESPEARE, files={"tinyshakespeare/input.txt": ""})
    monkeypatch.setattr(sources, "SHAKESPEARE", known)
    small = [
        "rounds=1",
        "data.args={length=8, least=10}",
        "data.unseen_agents=2",
        "method.batch_size=4",
    ]
    with without_report():
        run = nufed.run("shakespeare", [*small, "model.args.hidden=[4]"], out=tmp_path / "run")
    assert (run.agents, run.unseen) == (10, 2) and run.measure.name == "bits_per_character"
