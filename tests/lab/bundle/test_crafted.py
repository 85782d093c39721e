"""Damaged or crafted bundles: none is accepted, no code is run, every refusal has a reason."""

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

from nufed import Bundle, InputError, load_adapted, load_bundle
from nufed.lab.bundle import bundle as bundle_file
from nufed.lab.files import read_sealed, write_sealed


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A bundle of one of nufed's models."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    bundle = Bundle.of(
        module,
        build="fcnn",
        args={"input_shape": [5], "outputs": 3, "hidden": [4]},
        input_shape=(5,),
        adapt_lr=0.1,
        classes=("a", "b", "c"),
    )
    path = bundle.save(tmp_path_factory.mktemp("good") / "good.nufed")
    load_bundle(path)
    return path


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that leaves a file behind when it is imported."""
    (tmp_path / "trap.py").write_text("from pathlib import Path\nPath('sprung').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    assert not (tmp_path / "sprung").exists()


def refused(path, **kwargs):
    with pytest.raises(InputError) as caught:
        load_bundle(path, **kwargs)
    return str(caught.value)


def changed(good, path, change):
    """A valid bundle whose description was changed and sealed again."""
    sealed = read_sealed(good)
    change(sealed.about["bundle"])
    write_sealed(path, sealed.about, sealed.tensors)


CRAFTED = {
    "newer format": (lambda a: a.update(format=5), "has format 5, .* install a newer nufed"),
    "columns that make other inputs": (
        lambda a: a.update(preparation=[{"name": "age"}]),
        r"its preparation makes 1 inputs, not \[",
    ),
    "columns of another form": (
        lambda a: a.update(preparation=[{"name": "age", "eval": "x"}]),
        "a column has no 'eval'",
    ),
    "a column with an infinite scale": (
        lambda a: a.update(preparation=[{"name": "age", "scale": 1e999}]),
        "can't be used as a bundle",
    ),
    "no format": (lambda a: a.pop("format"), "has format None"),
    "code of theirs": (
        lambda a: a["model"].update(build="trap:make"),
        "code that would be imported",
    ),
    "a loss of theirs": (lambda a: a.update(loss="trap:loss"), "code that would be imported"),
    "code by another name": (lambda a: a["model"].update(build="os.system"), "would be imported"),
    "unknown key": (lambda a: a.update(run="rm"), "run is invalid"),
    "a width that fits no machine": (
        lambda a: a["model"]["args"].update(hidden=[2**40]),
        "do not match the module",
    ),
    "a thousand layers": (
        lambda a: a["model"]["args"].update(hidden=[1] * 20_000),
        "model.args is invalid",
    ),
    "no such argument": (lambda a: a["model"]["args"].update(depth=2), "fails with arguments"),
    "a shape of numbers that are none": (
        lambda a: a["inputs"].update(shape=[-1]),
        "inputs.shape",
    ),
    "a huge input": (lambda a: a["inputs"].update(shape=[2**39, 2**39]), "too large"),
    "not a number": (lambda a: a["inputs"].update(scale=float("nan")), "inputs.scale"),
    "a range of nothing": (lambda a: a["inputs"].update(range={"low": 0.0}), "inputs.range"),
    "a negative step": (lambda a: a["adapt"].update(lr=-1.0), "adapt.lr"),
    "stored step sizes that are not there": (
        lambda a: a["adapt"].update(lr="stored"),
        "no step sizes beside",
    ),
    "steps without end": (lambda a: a["adapt"].update(steps=10**12), "adapt.steps"),
    "step sizes of others": (lambda a: a["adapt"].update(lr={"x": 0.1}), "must have one for every"),
    "another optimiser": (lambda a: a["adapt"].update(optimiser="adam"), "adapt.optimiser"),
    "another dtype": (lambda a: a.update(dtype="float64"), "do not match the module"),
    "classes that are none": (lambda a: a.update(classes=[1, 2]), "classes"),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_crafted_descriptions_are_refused(good, trap, what):
    change, words = CRAFTED[what]
    changed(good, trap / "b.nufed", change)
    with pytest.raises(InputError, match=words):
        load_bundle(trap / "b.nufed")


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {**w, "1.weight": torch.full_like(w["1.weight"], float("nan"))},
        lambda w: {**w, "1.weight": w["1.weight"].T.contiguous()},
        lambda w: {**w, "1.weight": w["1.weight"].double()},
        lambda w: {**w, "more": torch.zeros(2)},
        lambda w: {name: tensor for name, tensor in w.items() if name != "1.weight"},
        lambda w: {},
    ],
)
def test_weights_that_are_not_the_models_are_refused(good, trap, change):
    sealed = read_sealed(good)
    write_sealed(trap / "b.nufed", sealed.about, change(sealed.tensors))
    assert "can't be used" in refused(trap / "b.nufed")


def test_files_that_are_not_bundles_are_refused(good, trap, monkeypatch):
    sealed, content = read_sealed(good), good.read_bytes()
    write_sealed(trap / "other.safetensors", {"adapted": sealed.about["bundle"]}, sealed.tensors)
    write_sealed(trap / "deep.safetensors", {"bundle": nested(900)}, sealed.tensors)
    crafted = {
        "an adapted model": (trap / "other.safetensors").read_bytes(),
        "nested": (trap / "deep.safetensors").read_bytes(),
        "no seal": save(sealed.tensors),
        "a prefix": b"#!/bin/sh\n" + content,
        "a suffix": content + b"\0",
        "a header without end": b"\xff" * 8 + content[8:],
        "nothing": b"",
        "text": b"hello",
    }
    for what, wrong in crafted.items():
        (trap / "b.nufed").write_bytes(wrong)
        assert f"{trap / 'b.nufed'} can't be used as a bundle" in refused(trap / "b.nufed"), what
    for nowhere in (trap, trap / "nowhere.nufed"):
        assert "is not a file" in refused(nowhere)
    with pytest.raises(InputError, match=r"must end in \.nufed"):
        load_bundle(good).save(trap / "folder")
    monkeypatch.setattr(bundle_file, "MAX_BYTES", 100)
    assert "larger than 100 bytes" in refused(good)


def nested(depth):
    return [nested(depth - 1)] if depth else []


def damaged(content, rng):
    """A file with a random bit flipped, truncated, or overwritten with random bytes."""
    kind = rng.integers(4)
    if kind == 0:
        return content[: rng.integers(len(content))]
    changed = bytearray(content)
    if kind == 3:
        start = rng.integers(len(content))
        piece = rng.bytes(int(rng.integers(1, 50)))
        changed[start : start + len(piece)] = piece
        return bytes(changed)
    place = rng.integers(len(content) * 8)
    changed[place // 8] ^= 1 << (place % 8)
    return bytes(changed)


def damage(good, tmp_path, count, seed):
    """Damaged bundles and adapted models: every one is refused."""
    rng = np.random.default_rng(seed)
    bundle, content = load_bundle(good), good.read_bytes()
    x = rng.normal(size=(12, 5))
    adapted = bundle.adapt(x, np.arange(12) % 3).save(tmp_path / "mine.safetensors")
    model, accepted = adapted.read_bytes(), 0
    for number in range(count):
        kind = number % 2
        path, before = ((tmp_path / "b.nufed", content), (adapted, model))[kind]
        spoiled = damaged(before, rng)
        if spoiled == before:
            continue
        path.write_bytes(spoiled)
        try:
            load_adapted(path) if kind else load_bundle(path)
            accepted += 1
        except InputError as error:
            assert str(tmp_path) in str(error)
        path.write_bytes(before)
    assert accepted == 0


def test_damaged_files_are_refused(good, tmp_path):
    damage(good, tmp_path, 300, seed=0)


@pytest.mark.slow
def test_many_damaged_files_are_refused(good, tmp_path):
    damage(good, tmp_path, 10_000, seed=1)


def test_a_card_shows_text_as_text(good, trap):
    def change(about):
        about["classes"] = ["[a](http://x)", "b\n# B", "\x1b[31m|`c`\u202e"]
        about["name"] = "<b>\n## x"
        about["trained"] = {"k\n- y": ["*z*"]}

    changed(good, trap / "b.nufed", change)
    card = load_bundle(trap / "b.nufed").card
    assert card.splitlines()[0] == r"# \<b\>\\n\#\# x"
    assert r"- classes: \[a\](http://x), b\\n\# B, \\x1b\[31m\|\`c\`\\u202e" in card
    assert all(line.isprintable() for line in card.splitlines())


@pytest.mark.parametrize(
    "measured", [{"x": 1}, {"groups": 3}, {"groups": {"seen": {}}}, {"groups": {"seen": [1]}}]
)
def test_measurements_of_another_layout_are_refused(good, trap, measured):
    measured = {"measure": "a", "scored_on": "b", "steps": 1, "split_sha256": "", **measured}
    changed(good, trap / "b.nufed", lambda about: about.update(measured=measured))
    assert "`measured` can't be shown" in refused(trap / "b.nufed")
