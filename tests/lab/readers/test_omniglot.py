"""Omniglot as a federation: small files made here, and the real one where it is."""

import hashlib
import io
import runpy
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import nufed
from nufed import InputError
from nufed.data import given, make_split
from nufed.data.omniglot import omniglot14
from nufed.lab import downloads
from nufed.lab.readers.sources import OMNIGLOT, OMNIGLOT_PART, _images, omniglot
from support import without_report

FILE = "omniglot.npz"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("NUFED_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def packed(**changed):
    """Alphabets of 7 and 5 characters, 3 drawings each; some arrays changed or left out."""
    alphabet = np.repeat([0, 1], [21, 15]).astype(np.uint8)
    character = np.concatenate([np.repeat(np.arange(n), 3) for n in (7, 5)]).astype(np.uint8)
    drawn = np.random.default_rng(0).random((36, 105 * 105)) < 0.1
    arrays = {
        "ink": np.packbits(drawn, axis=1),
        "alphabet": alphabet,
        "character": character,
        "drawer": np.tile(np.arange(3, dtype=np.uint8), 12),
        "alphabets": np.array(["Greek", "Korean"]),
    } | changed
    buffer = io.BytesIO()
    np.savez(buffer, **{name: array for name, array in arrays.items() if array is not None})
    return buffer.getvalue()


def test_every_agent_has_characters_of_one_alphabet(directory):
    (directory / FILE).write_bytes(packed())
    samples = omniglot(ways=3)
    rows, names = given(samples.owners)
    assert names == ("Greek-0", "Greek-1", "Korean-0") and samples.classes == ("0", "1", "2")
    for own in rows:
        assert samples.targets[own].bincount().tolist() == [3, 3, 3]
    # no drawing twice
    assert len({samples.inputs[i].numpy().tobytes() for i in range(len(samples))}) == 27
    assert omniglot(ways=3).fingerprint == samples.fingerprint
    assert omniglot(ways=3, seed=1).fingerprint != samples.fingerprint
    for ways, sentence in ((1, "at least 2"), (8, "at most the number of characters")):
        with pytest.raises(InputError, match=f"ways = {ways}: .*{sentence}"):
            omniglot(ways=ways)


def test_drawings_are_scaled_down_as_adaptive_average_pooling_does():
    drawn = np.random.default_rng(1).random((3, 105, 105)) < 0.3
    images = _images(np.packbits(drawn.reshape(3, -1), axis=1))
    assert images.shape == (3, 28, 28) and images.dtype == np.uint8
    right = F.adaptive_avg_pool2d(torch.from_numpy(drawn).double(), 28) * 255
    assert np.abs(images - right.numpy()).max() <= 0.5 + 1e-9


@pytest.mark.parametrize(
    "content",
    [
        packed(ink=None),
        packed(drawer=None),
        packed(ink=np.zeros((36, 1378), np.uint8)),
        packed(ink=np.zeros((36, 1379))),
        packed(character=np.zeros(35, np.uint8)),
        packed(character=np.zeros(36)),
        packed(alphabets=np.array(["Greek"])),
        packed(alphabets=np.array(["Greek", "Greek"])),
        packed(alphabets=np.array(["a", {}], object)),
        packed(evaluation=np.array([0, 1, 0])),
        packed(evaluation=np.array(["a", "b"])),
        packed()[:-40],
        b"",
    ],
)
def test_other_layouts_and_pickles_are_refused(content, directory):
    (directory / FILE).write_bytes(content)
    with pytest.raises(InputError, match=r"does not have the layout of Omniglot.*docs/data.md"):
        omniglot()


def test_a_file_that_the_user_made_is_checked_and_copied(directory, tmp_path):
    with pytest.raises(InputError, match=r"omniglot is not here .*`nufed data get omniglot`"):
        omniglot()
    with pytest.raises(InputError, match=f"docs/data.md says how to make {FILE}"):
        downloads.fetch(OMNIGLOT)
    mine = tmp_path / "mine.npz"
    mine.write_bytes(packed(ink=None))
    with pytest.raises(InputError, match=r"mine.npz does not have the layout .*ink is not in it"):
        downloads.fetch(OMNIGLOT, archive=mine)
    assert not list(directory.iterdir())
    mine.write_bytes(packed())
    assert downloads.fetch(OMNIGLOT, archive=mine)
    assert (directory / FILE).read_bytes() == mine.read_bytes()


def test_agents_of_evaluation_alphabets_are_unseen(directory):
    (directory / FILE).write_bytes(packed(evaluation=np.array([0, 1], np.uint8)))
    assert omniglot(ways=2).unseen_owners == ("Korean-0", "Korean-1")
    (directory / FILE).write_bytes(packed())
    assert omniglot(ways=2).unseen_owners == ()


def test_the_file_of_earlier_versions_gives_the_same_data(directory):
    (directory / OMNIGLOT_PART).write_bytes(packed())
    before = omniglot(ways=3)
    # recorded with the version that knew this file alone
    assert before.fingerprint.startswith("f4f3bd23ad710abb")
    (directory / FILE).write_bytes(packed(evaluation=np.array([0, 1], np.uint8)))
    assert omniglot(ways=3).unseen_owners == ("Korean-0",)


def test_drawn_tasks_and_drawings(directory):
    """Agents of one alphabet may share characters; agents of different ones can't."""
    (directory / FILE).write_bytes(packed())
    samples = omniglot(ways=3, samples=2, tasks=9)
    rows, names = given(samples.owners)
    assert len(names) == 18 and names[0] == "Greek-0" and names[-1] == "Korean-8"
    held: dict[str, set[bytes]] = {"Greek": set(), "Korean": set()}
    for own, name in zip(rows, names, strict=True):
        assert samples.targets[own].tolist() == [0, 0, 1, 1, 2, 2]
        drawings = {samples.inputs[row].numpy().tobytes() for row in own}
        assert len(drawings) == 6
        held[name.partition("-")[0]] |= drawings
    assert not held["Greek"] & held["Korean"]
    assert len(held["Greek"]) <= 21  # fewer than the 54 that agents hold: some are shared
    for name in ("samples", "tasks"):
        with pytest.raises(InputError, match=f"{name} = 0: must be a whole number, at least 1"):
            omniglot(**{name: 0})


def test_the_shipped_drawings():
    """50 alphabets and 1,623 characters; no drawing is empty."""
    with as_file(files("nufed.data") / "omniglot14.npz") as path, np.load(path) as archive:
        ink, alphabet, character = (archive[k] for k in ("ink", "alphabet", "character"))
        assert archive["evaluation"].sum() == 20 and len(archive["alphabets"]) == 50
        assert path.stat().st_size < 1_000_000
    kinds, counts = np.unique(np.stack([alphabet, character]), axis=1, return_counts=True)
    assert kinds.shape[1] == 1623 and set(counts) == {20}
    assert np.unpackbits(ink, axis=1, count=196).any(axis=1).all()


def test_no_character_of_an_evaluation_alphabet_is_trained_on():
    samples = omniglot14(tasks=3)
    rows, names = given(samples.owners)
    split = make_split(
        rows, 0, validation=0.0, test=0.5, unseen_agents=samples.unseen_owners, names=names
    )
    held_out = {names[agent].rpartition("-")[0] for agent in split.unseen}
    trained = {names[agent].rpartition("-")[0] for agent in split.seen}
    assert len(held_out) == 20 and len(trained) == 30 and not held_out & trained


def test_the_tool_makes_the_shipped_drawings(real_data):
    if OMNIGLOT.missing():
        pytest.skip("set NUFED_DATA to a directory made by `nufed data get omniglot`")
    tool = runpy.run_path(str(Path(__file__).parents[3] / "tools/make_omniglot14.py"))
    content = (real_data / FILE).read_bytes()
    assert hashlib.sha256(content).hexdigest() == tool["KNOWN"]
    with np.load(real_data / FILE) as whole, np.load(tool["OUT"]) as shipped:
        some = slice(None, None, 7)
        assert (tool["small"](whole["ink"][some]) == shipped["ink"][some]).all()
        for name in ("alphabet", "character", "drawer", "alphabets", "evaluation"):
            assert (whole[name] == shipped[name]).all()


def test_the_real_omniglot(real_data):
    if OMNIGLOT.missing():
        pytest.skip("set NUFED_DATA to a directory made by `nufed data get omniglot`")
    samples = omniglot()
    rows, names = given(samples.owners)
    assert len(names) == 309 and samples.input_shape == (28, 28) and len(samples) == 30_900
    assert len(samples.unseen_owners) == 128
    for own in rows:
        assert samples.targets[own].bincount().tolist() == [20] * 5
    ink = samples.take(np.arange(100))[0]
    assert ink.min() >= 0 and ink.max() <= 1 and 0.02 < ink.mean() < 0.3


def test_the_preset_scores_newcomers_with_alphabets_of_their_own(tmp_path):
    small = [
        "rounds=2",
        "seeds=[0]",
        "eval_agents=8",
        "data.args={tasks=1, samples=8}",
        "method.batch_size=6",
    ]
    with without_report():
        run = nufed.run("omniglot", small, out=tmp_path / "run")
    assert (run.agents, run.unseen) == (50, 20)
    assert {row.group for row in run.rows()} == {"seen", "unseen"}
    methods = {row.name for row in run.rows() if row.kind == "method"}
    assert methods == {"fedavg", "per-fedavg", "gmeta", "fedavg-5-steps"}
