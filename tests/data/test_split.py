import numpy as np
import pytest
from hypothesis import given, strategies as st

from nufed import InputError
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


def test_bad_requests_are_refused():
    rows = [np.arange(10), np.arange(3)]
    with pytest.raises(InputError, match="agent 1 has 3 samples, too few"):
        make_split(rows, 0, validation=0.0, test=0.1)
    with pytest.raises(InputError, match=r"unseen_agents = 2: .* 0 … 1"):
        make_split(rows, 0, validation=0.0, test=0.3, unseen_agents=2)


def test_unseen_agents_are_named():
    rows = [np.arange(10), np.arange(10, 20), np.arange(20, 30)]
    names = ("ann", "bob", "eve")

    def split(unseen, names=names):
        return make_split(rows, 0, validation=0.0, test=0.3, unseen_agents=unseen, names=names)

    assert split(["eve", "ann"]).unseen == (0, 2) and list(split(["eve", "ann"]).seen) == [1]
    assert split([]).unseen == () and split(["1"], None).unseen == (1,)
    for wrong, sentence in (
        (
            ["even"],
            r"data.unseen = \['even'\]: no agent is called 'even', the agents are ann, bob,",
        ),
        (["evee"], "did you mean 'eve'"),
        (["ann", "ann"], "must be different agents"),
        (list(names), "of 3 at least one must be left"),
    ):
        with pytest.raises(InputError, match=sentence):
            split(wrong)


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
