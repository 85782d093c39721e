"""Omniglot as a federation: small files made here, and the real one where it is."""

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nufed import InputError
from nufed.data import given
from nufed.lab import downloads
from nufed.lab.readers.sources import OMNIGLOT, _images, omniglot

FILE = "omniglot_8_alphabets.npz"


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


def test_the_real_omniglot(real_data):
    if OMNIGLOT.missing():
        pytest.skip("set NUFED_DATA to a directory made by `nufed data get omniglot`")
    samples = omniglot()
    rows, names = given(samples.owners)
    assert len(names) == 45 and samples.input_shape == (28, 28) and len(samples) == 4500
    for own in rows:
        assert samples.targets[own].bincount().tolist() == [20] * 5
    ink = samples.take(np.arange(100))[0]
    assert ink.min() >= 0 and ink.max() <= 1 and 0.02 < ink.mean() < 0.3
