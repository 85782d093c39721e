"""Files of splits: damaged ones and those that leak are refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from data.test_split import LABELS, example, lazy
from nufed import InputError, Split
from nufed.lab.config.split_file import load_split, split_bytes


def save(split, path):
    path.write_bytes(split_bytes(split))


def test_a_split_is_saved_and_read_back(tmp_path):
    split = example()
    save(split, tmp_path / "split.safetensors")
    back = load_split(tmp_path / "split.safetensors")
    assert back.fingerprint == split.fingerprint == example().fingerprint
    assert back.names == ("ann", "bob") and back.unseen == split.unseen
    assert all(map(np.array_equal, back.train, split.train))
    assert example(seed=1).fingerprint != split.fingerprint


@settings(max_examples=40)
@given(st.data())
def test_any_flipped_bit_is_detected(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "split.safetensors"
    save(example(), path)
    damaged = bytearray(path.read_bytes())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    with pytest.raises(InputError, match="split"):
        load_split(path)


def test_a_missing_file_is_refused():
    with pytest.raises(InputError, match="can't be read as a split"):
        load_split("nowhere.safetensors")


def parts(**changed):
    """Two agents' parts, some of them replaced."""
    good = {"train": [[0, 1], [4, 5]], "validation": [[], [6]], "test": [[2], [7]]}
    made = {kind: [np.array(r, np.int64) for r in own] for kind, own in (good | changed).items()}
    return Split(**made, names=("ann", "bob"))


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (parts(test=[[1], [7]]), "row 1 is in the train part of agent 'ann' and in the test part"),
        (parts(test=[[2], [0]]), "row 0 is in the train part of agent 'ann' .* of agent 'bob'"),
        (parts(validation=[[], [2]]), "row 2 is in the validation part of agent 'bob' and in the"),
        (parts(train=[[0, 1, 0], [4]]), "row 0 .* 'ann' and .* 'ann', and an agent must not"),
        (parts(test=[[2], [7, 7]]), "row 7 is in the test part of agent 'bob' and in the test"),
        (parts(train=[[0, -1], [4, 5]]), "row -1 in the train part of agent 'ann' is outside"),
        (parts(test=[[2], [8]]), "row 8 in the test part of agent 'bob' is outside .* 0 … 7"),
        (parts(train=[[0, 1], []]), "agent 'bob' has no training rows"),
        (parts(test=[[2]]), r"names 2 agents and has parts for \[1, 2\]"),
        (replace(parts(), unseen=(0, 1)), r"unseen = \(0, 1\): must be different agents of 0 … 1"),
        (replace(parts(), unseen=(2,)), r"unseen = \(2,\): must be different agents of 0 … 1"),
    ],
)
def test_a_split_that_leaks_or_lies_outside_of_the_data_is_refused(tmp_path, split, words):
    path = tmp_path / "split.safetensors"
    save(split, path)
    with pytest.raises(InputError, match=f"{path} can't be used as a split: .*{words}"):
        load_split(path, np.zeros(8))


@pytest.mark.parametrize(
    "split",
    [
        replace(parts(), unseen=([0],)),
        replace(parts(), unseen=("0",)),
        replace(parts(), names=(["ann"], 2)),
        replace(parts(), train=[np.zeros((1, 2), np.int64)] * 2),
    ],
)
def test_a_split_of_another_form_is_refused(tmp_path, split):
    save(split, tmp_path / "split.safetensors")
    with pytest.raises(InputError, match=r"can't be read as a split|is damaged"):
        load_split(tmp_path / "split.safetensors", np.zeros(8))


def test_agents_may_share_rows_of_one_kind(tmp_path):
    split = parts(train=[[0, 1], [1, 5]], test=[[2, 7], [7]])
    save(split, tmp_path / "split.safetensors")
    assert load_split(tmp_path / "split.safetensors", np.zeros(8)).fingerprint == split.fingerprint


def test_a_lazy_split_is_saved_as_its_recipe(tmp_path):
    split, path = lazy(), tmp_path / "split.safetensors"
    save(split, path)
    assert path.stat().st_size < 1000
    again = load_split(path, LABELS)
    assert again.fingerprint == split.fingerprint and again.unseen == (7,)
    assert np.array_equal(again.train[5], split.train[5])
    assert lazy(unseen=(8,)).fingerprint != split.fingerprint
    with pytest.raises(InputError, match="made for other data"):
        load_split(path, LABELS[::-1].copy())
    with pytest.raises(InputError, match="give the labels of its data"):
        load_split(path)


def test_a_damaged_recipe_is_refused(tmp_path):
    path = tmp_path / "split.safetensors"
    save(lazy(), path)
    for old, new in ((b'\\"seed\\": 4', b'\\"seed\\": 5'), (b"0.3", b"0.4"), (b"[20", b"[19")):
        damaged = path.read_bytes().replace(old, new)
        assert damaged != path.read_bytes()
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(InputError, match="damaged"):
            load_split(tmp_path / "damaged", LABELS)
