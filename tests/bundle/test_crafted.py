"""Bundles that were damaged or crafted: none is accepted, no code is run, every refusal is said."""

import io
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from nufed import Bundle, InputError, load_adapted, load_bundle
from nufed.bundle.archive import CARD, MANIFEST, PARTS, WEIGHTS, read_parts, write_parts
from nufed.runs.durable import sha256, signed, verified


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A bundle of one of nufed's models, as its parts."""
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


def with_manifest(good, change):
    """The parts of a good bundle with a manifest that was changed and signed again."""
    parts = read_parts(good)
    manifest = verified(parts[MANIFEST])
    change(manifest["about"])
    return {**parts, MANIFEST: signed(manifest)}


def with_weights(good, change):
    """The parts of a good bundle with weights that were changed and hashed again."""
    parts = read_parts(good)
    manifest, weights = verified(parts[MANIFEST]), load(parts[WEIGHTS])
    content = save(change(weights))
    manifest["sha256"][WEIGHTS] = sha256(content)
    return {**parts, WEIGHTS: content, MANIFEST: signed(manifest)}


CRAFTED = {
    "newer format": (lambda a: a.update(format=2), "has format 2 .* install a newer nufed"),
    "no format": (lambda a: a.pop("format"), "has format None"),
    "code of theirs": (
        lambda a: a["model"].update(build="trap:make"),
        "code that would be imported",
    ),
    "a loss of theirs": (lambda a: a.update(loss="trap:loss"), "code that would be imported"),
    "code by another name": (lambda a: a["model"].update(build="os.system"), "would be imported"),
    "unknown key": (lambda a: a.update(run="rm"), "run can't be used"),
    "a width that fits no machine": (
        lambda a: a["model"]["args"].update(hidden=[2**40]),
        "do not fit the module",
    ),
    "a thousand layers": (
        lambda a: a["model"]["args"].update(hidden=[1] * 20_000),
        "model.args can't be used",
    ),
    "no such argument": (lambda a: a["model"]["args"].update(depth=2), "fails with arguments"),
    "a shape of numbers that are none": (
        lambda a: a["inputs"].update(shape=[-1]),
        "inputs.shape",
    ),
    "a huge input": (lambda a: a["inputs"].update(shape=[2**39, 2**39]), "too large"),
    "not a number": (lambda a: a["inputs"].update(scale=float("nan")), "inputs.scale"),
    "a negative step": (lambda a: a["adapt"].update(lr=-1.0), "adapt.lr"),
    "steps without end": (lambda a: a["adapt"].update(steps=10**12), "adapt.steps"),
    "step sizes of others": (lambda a: a["adapt"].update(lr={"x": 0.1}), "must name every"),
    "another optimiser": (lambda a: a["adapt"].update(optimiser="adam"), "adapt.optimiser"),
    "another dtype": (lambda a: a.update(dtype="float64"), "do not fit the module"),
    "classes that are none": (lambda a: a.update(classes=[1, 2]), "classes"),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_crafted_descriptions_are_refused(good, trap, what):
    change, words = CRAFTED[what]
    write_parts(trap / "b.nufed", with_manifest(good, change))
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
    write_parts(trap / "b.nufed", with_weights(good, change))
    assert "can't be used" in refused(trap / "b.nufed")


def archive(parts, names=PARTS, compression=zipfile.ZIP_STORED, extra=()):
    """A zip of these parts that nufed did not write."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        for name, part in [*zip(names, PARTS, strict=False), *extra]:
            made.writestr(name, parts[part])
    return file.getvalue()


def test_archives_that_nufed_did_not_write_are_refused(good, trap, recwarn):
    parts = read_parts(good)
    link = zipfile.ZipInfo(WEIGHTS)
    link.external_attr = 0o120777 << 16
    crafted = {
        "paths that lead out": archive(parts, ["../bundle.json", CARD, WEIGHTS]),
        "absolute paths": archive(parts, ["/bundle.json", CARD, WEIGHTS]),
        "compressed": archive(parts, compression=zipfile.ZIP_DEFLATED),
        "double parts": archive(parts, extra=[(MANIFEST, CARD)]),
        "hidden parts": archive(parts, extra=[("code.py", CARD)]),
        "parts that are missing": archive(parts, PARTS[:2]),
        "a link": archive(parts, [MANIFEST, CARD, link]),
        "other dates": archive(parts),
        "a prefix": b"#!/bin/sh\n" + good.read_bytes(),
        "a suffix": good.read_bytes() + b"\0",
        "nothing": b"",
        "a bomb": bomb(parts),
        "text": b"hello",
    }
    for what, content in crafted.items():
        (trap / "b.nufed").write_bytes(content)
        assert "can't be read as a bundle" in refused(trap / "b.nufed"), what
    assert not any(path.name not in ("b.nufed", "trap.py") for path in trap.iterdir())


def bomb(parts):
    """A card of a hundred megabytes in a hundred kilobytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(MANIFEST, parts[MANIFEST])
        made.writestr(WEIGHTS, parts[WEIGHTS])
        with made.open(CARD, "w") as card:
            for _ in range(100):
                card.write(bytes(1_000_000))
    return file.getvalue()


def test_directories_with_links_or_large_texts_are_refused(good, trap):
    folder = trap / "folder"
    write_parts(folder, read_parts(good))
    load_bundle(folder)
    (folder / CARD).rename(trap / "card")
    (folder / CARD).symlink_to(trap / "card")
    assert "symbolic link" in refused(folder)
    (folder / CARD).unlink()
    (folder / CARD).write_bytes(b"x" * 2_000_000)
    assert "larger than" in refused(folder)
    assert "does not exist" in refused(trap / "nowhere.nufed")
    with pytest.raises(InputError, match="exists: give a new directory"):
        write_parts(folder, read_parts(good))


def damaged(content, rng):
    """A file with a random bit flipped, a piece cut off, or random bytes in its place."""
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
    """Damaged bundles, bundle directories and adapted models: every one is refused."""
    rng = np.random.default_rng(seed)
    bundle, content, parts = load_bundle(good), good.read_bytes(), read_parts(good)
    x = rng.normal(size=(12, 5))
    adapted = bundle.adapt(x, np.arange(12) % 3).save(tmp_path / "mine.safetensors")
    model, accepted = adapted.read_bytes(), 0
    folder = tmp_path / "folder"
    write_parts(folder, parts)
    for number in range(count):
        kind = number % 3
        name = PARTS[number // 3 % len(PARTS)] if kind == 1 else ""
        path = (tmp_path / "b.nufed", folder / name, adapted)[kind]
        before = (content, parts.get(name, b""), model)[kind]
        spoiled = damaged(before, rng)
        if spoiled == before:
            continue
        path.write_bytes(spoiled)
        try:
            load_adapted(adapted) if kind == 2 else load_bundle(folder if kind == 1 else path)
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


@pytest.mark.parametrize("card", [b"\xff\xfe", b"# Official\n\x1b[2Jaccuracy 100 %\n", b""])
def test_a_card_is_made_from_the_manifest_whatever_text_is_stored(good, trap, card):
    parts = read_parts(good)
    manifest = verified(parts[MANIFEST])
    manifest["sha256"][CARD] = sha256(card)
    write_parts(trap / "b.nufed", {**parts, CARD: card, MANIFEST: signed(manifest)})
    bundle = load_bundle(trap / "b.nufed")
    assert bundle.card == load_bundle(good).card and "Official" not in bundle.card
    bundle.save(trap / "again.nufed")
    assert (trap / "again.nufed").read_bytes() == good.read_bytes()


def test_a_card_shows_text_as_text(good, trap):
    def change(about):
        about["classes"] = ["[a](http://x)", "b\n# B", "\x1b[31m|`c`\u202e"]
        about["name"] = "<b>\n## x"
        about["trained"] = {"k\n- y": ["*z*"]}

    write_parts(trap / "b.nufed", with_manifest(good, change))
    card = load_bundle(trap / "b.nufed").card
    assert card.splitlines()[0] == r"# \<b\>\\n\#\# x"
    assert r"- classes: \[a\](http://x), b\\n\# B, \\x1b\[31m\|\`c\`\\u202e" in card
    assert all(line.isprintable() for line in card.splitlines())


@pytest.mark.parametrize(
    "measured", [{"x": 1}, {"groups": 3}, {"groups": {"seen": {}}}, {"groups": {"seen": [1]}}]
)
def test_measurements_of_another_layout_are_refused(good, trap, measured):
    measured = {"measure": "a", "scored_on": "b", "steps": 1, "split_sha256": "", **measured}
    write_parts(
        trap / "b.nufed", with_manifest(good, lambda about: about.update(measured=measured))
    )
    assert "what was measured can't be shown" in refused(trap / "b.nufed")
