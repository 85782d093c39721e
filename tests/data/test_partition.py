import numpy as np
import pytest
from hypothesis import given as given_examples, strategies as st

from nufed import InputError
from nufed.data import DirichletReusing, dirichlet, given, iid, shards
from nufed.data.partition import _draw_counts


@st.composite
def labels(draw):
    """Class labels of uneven frequency, some classes possibly absent."""
    counts = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    return rng.permutation(np.repeat(np.arange(len(counts)), counts))


SEEDS = st.integers(0, 2**32 - 1)
CONCENTRATIONS = st.sampled_from([1e-300, 1e-4, 0.01, 0.3, 1.0, 100.0, 1e6])


def no_repeats(rows):
    return len(np.unique(rows)) == len(rows)


@given_examples(labels(), st.integers(1, 9), st.integers(1, 30), CONCENTRATIONS, SEEDS)
def test_dirichlet_never_reusing(labels, agents, size, concentration, seed):
    rng = np.random.default_rng(seed)
    if agents * size > len(labels):
        with pytest.raises(InputError, match=f"{agents} agents with {size} samples"):
            dirichlet(labels, agents, size, concentration, rng)
        return
    parts = dirichlet(labels, agents, size, concentration, rng)
    assert [len(p) for p in parts] == [size] * agents
    together = np.concatenate(parts)
    assert no_repeats(together) and together.min() >= 0 and together.max() < len(labels)


PART_SIZES = st.tuples(st.integers(1, 30), st.integers(0, 5), st.integers(1, 10))


@given_examples(labels(), st.integers(1, 9), PART_SIZES, CONCENTRATIONS, SEEDS)
def test_dirichlet_reusing_across_agents(labels, agents, sizes, concentration, seed):
    try:
        parts = DirichletReusing(labels, agents, sizes, concentration, seed)
    except InputError as error:
        assert "samples" in str(error) and sum(sizes) > len(labels) / 2 - 12 * 2
        return
    assert len(parts) == agents
    again = DirichletReusing(labels, agents + 3, sizes, concentration, seed)
    alike = zip(parts[agents - 1], again[agents - 1], strict=True)
    assert all(
        np.array_equal(a, b) for a, b in alike
    )  # independent of other agents and of the order
    for own in parts:
        assert [len(part) for part in own] == list(sizes) and all(map(no_repeats, own))
    # no agent trains on another's validation or test rows
    pools = [set(np.concatenate(column).tolist()) for column in zip(*parts, strict=True)]
    assert sum(map(len, pools)) == len(set.union(*pools))


@given_examples(st.integers(1, 200), st.integers(1, 20), st.none() | st.integers(1, 30), SEEDS)
def test_iid(samples, agents, size, seed):
    rng = np.random.default_rng(seed)
    if agents * (size or 1) > samples:
        with pytest.raises(InputError):
            iid(samples, agents, size, rng)
        return
    parts = iid(samples, agents, size, rng)
    together = np.concatenate(parts)
    assert no_repeats(together)
    if size is None:
        assert sorted(together) == list(range(samples))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    else:
        assert [len(p) for p in parts] == [size] * agents


@given_examples(
    st.integers(1, 8), st.integers(1, 12), st.integers(1, 8), st.none() | st.integers(1, 20), SEEDS
)
def test_shards(classes, agents, per_agent, size, seed):
    labels = np.repeat(np.arange(classes), 24)
    rng = np.random.default_rng(seed)
    try:
        parts = shards(labels, agents, per_agent, size, rng)
    except InputError as error:
        fitting = per_agent <= classes and (size is None or size >= per_agent)
        enough = size is not None and agents * size > len(labels) / 4
        assert not fitting or enough, error
        return
    together = np.concatenate(parts)
    assert no_repeats(together)
    assert all(len(np.unique(labels[p])) == per_agent for p in parts)
    if size is not None:
        assert [len(p) for p in parts] == [size] * agents
    elif agents * per_agent >= classes:
        assert len(together) == len(labels)  # every sample is dealt out


NAMES = st.text(st.characters(exclude_characters="\0"), max_size=3)  # numpy drops trailing zeros


@given_examples(st.lists(NAMES, min_size=1, max_size=50))
def test_given_assignments_are_kept(owners):
    parts, names = given(np.array(owners))
    assert sorted(np.concatenate(parts)) == list(range(len(owners)))
    for name, rows in zip(names, parts, strict=True):
        assert {owners[i] for i in rows} == {name}


def test_it_terminates_in_extreme_cases():
    labels = np.arange(50_000) % 100
    parts = dirichlet(labels, 500, 100, 1e-4, np.random.default_rng(0))
    assert {len(p) for p in parts} == {100}
    assert no_repeats(np.concatenate(parts))  # and every sample is used
    shared = DirichletReusing(labels, 500, (80, 0, 20), 1e-4, seed=0)
    purity = [np.bincount(labels[train]).max() / 80 for train, _, _ in shared]
    assert np.mean(purity) > 0.99  # nearly all hold one class
    assert all(labels[test][0] in labels[train] for train, _, test in shared)


def test_concentration_controls_heterogeneity_and_classes_follow_the_drawn_distribution():
    labels = np.arange(10_000) % 10
    spread = []
    for concentration in (0.01, 0.3, 1e4):
        parts = dirichlet(labels, 20, 100, concentration, np.random.default_rng(1))
        spread.append(np.mean([np.bincount(labels[p], minlength=10).max() for p in parts]))
    assert spread[0] > 90 > spread[1] > 30 > 25 > spread[2]
    # α_d → 0: the one class of each agent is uniform over classes
    alone = DirichletReusing(labels, 2000, (5,), 1e-4, seed=2)
    firsts = np.bincount([labels[part[0]] for (part,) in alone], minlength=10)
    assert np.abs(firsts - 200).max() < 5 * np.sqrt(2000 * 0.1 * 0.9)


def test_exhausted_classes_are_renormalised_like_drawing_one_by_one():
    """Against a one-by-one sampler: the same distribution of class counts."""
    available, pmf = np.array([3, 50, 50]), np.array([0.6, 0.3, 0.1])
    rng = np.random.default_rng(0)
    ours = np.mean([_draw_counts(pmf, available, 12, rng) for _ in range(4000)], axis=0)
    theirs = np.zeros(3)
    for _ in range(4000):
        left = available.copy()
        for _ in range(12):
            weights = np.where(left > 0, pmf, 0)
            left[rng.choice(3, p=weights / weights.sum())] -= 1
        theirs += (available - left) / 4000
    assert np.abs(ours - theirs).max() < 0.12  # five standard errors of the difference


def test_where_no_probability_is_left_remaining_counts_decide():
    counts = _draw_counts(np.array([1.0, 0, 0]), np.array([2, 10, 0]), 7, np.random.default_rng(0))
    assert counts.tolist() == [2, 5, 0]
