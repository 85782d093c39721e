from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nufed import InputError, Split
from nufed.data import DirichletReusing, lazy_split, make_split

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(SIZES, st.floats(0, 0.6), st.floats(0.05, 0.6), st.integers(0, 100))
def test_parts_are_disjoint_and_complete_and_of_the_asked_size(sizes, validation, test, seed):
    ends = np.cumsum(sizes)
    rows = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    unseen = seed % len(sizes)
    try:
        split = make_split(rows, seed, validation=validation, test=test, unseen_agents=unseen)
    except InputError as error:
        assert "too few for a training part" in str(error)
        return
    for agent, own in enumerate(rows):
        parts = [split.train[agent], split.validation[agent], split.test[agent]]
        assert sorted(np.concatenate(parts)) == own.tolist()
        assert len(parts[1]) == round(validation * len(own))
        assert len(parts[2]) == round(test * len(own))
        assert len(parts[0]) >= 1
    assert len(split.unseen) == unseen and len(split.seen) + unseen == len(rows)


def test_the_papers_parts():
    split = make_split([np.arange(1000)], 0, validation=0.0, test=0.2)
    assert (len(split.train[0]), len(split.validation[0]), len(split.test[0])) == (800, 0, 200)


def example(seed=0):
    rows = [np.arange(10), np.arange(10, 25)]
    return make_split(rows, seed, validation=0.1, test=0.2, unseen_agents=1, names=("ann", "bob"))


def test_a_split_is_saved_and_read_back(tmp_path):
    split = example()
    split.save(tmp_path / "split.safetensors")
    back = Split.load(tmp_path / "split.safetensors")
    assert back.fingerprint == split.fingerprint == example().fingerprint
    assert back.names == ("ann", "bob") and back.unseen == split.unseen
    assert all(map(np.array_equal, back.train, split.train))
    assert example(seed=1).fingerprint != split.fingerprint


@settings(max_examples=40)
@given(st.data())
def test_any_flipped_bit_is_detected(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "split.safetensors"
    example().save(path)
    damaged = bytearray(path.read_bytes())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    with pytest.raises(InputError, match="split"):
        Split.load(path)


def test_bad_requests_are_refused():
    rows = [np.arange(10), np.arange(3)]
    with pytest.raises(InputError, match="agent 1 has 3 samples, too few"):
        make_split(rows, 0, validation=0.0, test=0.1)
    with pytest.raises(InputError, match=r"unseen_agents = 2: .* 0 … 1"):
        make_split(rows, 0, validation=0.0, test=0.3, unseen_agents=2)
    with pytest.raises(InputError, match="can't be read as a split"):
        Split.load("nowhere.safetensors")


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
    split.save(path)
    with pytest.raises(InputError, match=f"{path} can't be used as a split: .*{words}"):
        Split.load(path, np.zeros(8))


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
    split.save(tmp_path / "split.safetensors")
    with pytest.raises(InputError, match=r"can't be read as a split|is damaged"):
        Split.load(tmp_path / "split.safetensors", np.zeros(8))


def test_agents_may_share_rows_of_one_kind(tmp_path):
    split = parts(train=[[0, 1], [1, 5]], test=[[2, 7], [7]])
    split.save(tmp_path / "split.safetensors")
    assert Split.load(tmp_path / "split.safetensors", np.zeros(8)).fingerprint == split.fingerprint


LABELS = np.arange(600) % 3


def lazy(agents=10**6, unseen=(7,), labels=LABELS):
    return lazy_split(DirichletReusing(labels, agents, (20, 0, 5), 0.3, seed=4), unseen)


def test_a_million_agents_are_drawn_lazily():
    split = lazy()
    assert len(split.agents) == len(split.names) == 10**6 and split.names[123_456] == "123456"
    assert split.most_rows == 20 and split.smallest_agent == 0
    assert 7 not in split.seen and len(split.seen) == 10**6 - 1
    first = split.train[999_999], split.test[999_999]
    for agent in range(300):  # more than are cached
        assert len(split.train[agent]) == 20 and len(split.test[agent]) == 5
    again = split.train[999_999], split.test[999_999]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({split.train[agent].tobytes() for agent in range(50)}) > 45
    with pytest.raises(IndexError):
        split.train[10**6]


def test_a_lazy_split_is_saved_as_its_recipe(tmp_path):
    split, path = lazy(), tmp_path / "split.safetensors"
    split.save(path)
    assert path.stat().st_size < 1000
    again = Split.load(path, LABELS)
    assert again.fingerprint == split.fingerprint and again.unseen == (7,)
    assert np.array_equal(again.train[5], split.train[5])
    assert lazy(unseen=(8,)).fingerprint != split.fingerprint
    with pytest.raises(InputError, match="made for other data"):
        Split.load(path, LABELS[::-1].copy())
    with pytest.raises(InputError, match="give the labels of its data"):
        Split.load(path)


def test_a_damaged_recipe_is_refused(tmp_path):
    path = tmp_path / "split.safetensors"
    lazy().save(path)
    for old, new in ((b'\\"seed\\": 4', b'\\"seed\\": 5'), (b"0.3", b"0.4"), (b"[20", b"[19")):
        damaged = path.read_bytes().replace(old, new)
        assert damaged != path.read_bytes()
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(InputError, match="damaged"):
            Split.load(tmp_path / "damaged", LABELS)
