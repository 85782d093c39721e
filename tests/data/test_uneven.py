"""Partitions of unequal sizes: they terminate, use every sample once, and keep the minimum size."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from nufed import InputError
from nufed.data import dirichlet_by_class, quantity_skew
from nufed.data.partition import _repaired
from nufed.lab.config.load import load_config
from nufed.lab.config.problem import build_samples, build_split

SEEDS = st.integers(0, 2**32 - 1)
CONCENTRATIONS = st.sampled_from([1e-300, 1e-4, 0.01, 0.3, 1.0, 100.0, 1e6])


def deal(kind, labels, agents, size, concentration, rng, **arguments):
    if kind == "quantity_skew":
        return quantity_skew(len(labels), agents, size, concentration, rng, **arguments)
    balancing = kind == "self_balancing"
    return dirichlet_by_class(
        labels, agents, size, concentration, rng, self_balancing=balancing, **arguments
    )


KINDS = ("dirichlet_by_class", "self_balancing", "quantity_skew")


@pytest.mark.parametrize("kind", KINDS)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    agents=st.integers(1, 9),
    size=st.none() | st.integers(1, 30),
    concentration=CONCENTRATIONS,
    min_size=st.integers(1, 12),
    seed=SEEDS,
)
def test_every_sample_is_used_once_and_every_agent_has_enough(
    kind, counts, agents, size, concentration, min_size, seed
):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    used = len(labels) if size is None else agents * size

    def dealt():
        rng = np.random.default_rng(seed)
        return deal(kind, labels, agents, size, concentration, rng, min_size=min_size)

    if used > len(labels) or agents * min_size > used:
        with pytest.raises(InputError, match=f"{agents} agents with .* ask for fewer agents"):
            dealt()
        return
    parts = dealt()
    together = np.concatenate(parts)
    assert len(parts) == agents and min(map(len, parts)) >= min_size
    assert len(together) == len(np.unique(together)) == used
    assert together.min() >= 0 and together.max() < len(labels)
    assert all(map(np.array_equal, parts, dealt()))  # by the seed alone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("concentration", [1e-300, 1e-4])
def test_extreme_concentration_and_many_agents_terminate(kind, concentration):
    labels = np.arange(6_000) % 10
    parts = deal(kind, labels, 600, None, concentration, np.random.default_rng(0), min_size=10)
    assert {len(part) for part in parts} == {10}  # exactly enough: all had to be repaired
    assert len(np.unique(np.concatenate(parts))) == 6_000


def test_shares_of_a_class_follow_the_dirichlet_distribution():
    """Mean 1/N and variance (1/N)(1 − 1/N)/(αN + 1) of a symmetric Dirichlet."""
    labels, agents, alpha = np.arange(20_000) % 20, 5, 0.5
    shares = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        parts = dirichlet_by_class(labels, agents, None, alpha, rng, min_size=1)
        shares += [np.bincount(labels[part], minlength=20) / 1000 for part in parts]
    shares = np.concatenate(shares)
    variance = (1 / agents) * (1 - 1 / agents) / (alpha * agents + 1)
    assert shares.mean() == pytest.approx(1 / agents)
    assert shares.var() == pytest.approx(variance, rel=0.08)
    # towards infinity all agents are alike
    parts = dirichlet_by_class(labels, 100, None, 1e8, np.random.default_rng(0))
    assert {len(part) for part in parts} == {200}


def test_self_balancing_bounds_the_sizes():
    labels = np.arange(10_000) % 10
    sizes = [
        sorted(
            len(part)
            for part in dirichlet_by_class(
                labels, 20, None, 0.1, np.random.default_rng(1), self_balancing=balancing
            )
        )
        for balancing in (False, True)
    ]
    # one class at most beyond the mean size of 500
    assert sizes[1][-1] < 500 + 1000 and np.std(sizes[1]) < np.std(sizes[0])


def test_quantity_skew_changes_sizes_and_not_classes():
    labels = np.arange(50_000) % 10
    parts = quantity_skew(len(labels), 20, None, 0.5, np.random.default_rng(0))
    sizes = np.array([len(part) for part in parts])
    assert sizes.max() > 10 * sizes.min()
    for part in parts:
        shares = np.bincount(labels[part], minlength=10) / len(part)
        assert np.abs(shares - 0.1).max() < 5 * np.sqrt(0.1 * 0.9 / len(part))


def test_the_repair_takes_from_the_largest_agents_and_their_most_frequent_class():
    counts = np.array([[0, 0], [0, 90], [10, 20], [3, 0]])
    repaired = _repaired(counts, 10)
    assert repaired.tolist() == [[0, 10], [0, 73], [10, 20], [3, 7]]
    assert counts[1, 1] == 90  # unchanged


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.partition_args={min_size=0}"], "min_size = 0: must be a whole number, at least 1"),
        (["data.partition_args={min_size=1.5}"], "min_size = 1.5: must be a whole number"),
        (["data.partition_args={self_balancing=1}"], "self_balancing = 1: must be true or false"),
        (
            ["data.partition_args={min_sise=3}"],
            "{'min_sise': 3}: the partition 'dirichlet_by_class' takes min_size, self_balancing;",
        ),
        (["data.agents=100"], "100 agents with at least min_size = 10 samples need 1000 samples"),
        (["data.agents=1000"], "1000 agents with 8 samples on average need 8000 samples and"),
        (["data.source=sinusoid"], "this data has no classes; use 'iid', 'quantity_skew'"),
        (
            ["data.partition=iid", "data.partition_args={min_size=3}"],
            "data.partition_args = {'min_size': 3}: the partition 'iid' takes none",
        ),
    ],
)
def test_bad_settings_are_one_clear_sentence(overrides, sentence):
    given = ["data.partition=dirichlet_by_class", "data.samples_per_agent=8", *overrides]
    data = load_config({}, given).data
    with pytest.raises(InputError, match=sentence):
        build_split(data, build_samples(data), seed=0)


def test_a_configuration_deals_a_subset_of_the_mean_size():
    for partition in ("dirichlet_by_class", "quantity_skew"):
        overrides = [
            f"data.partition={partition}",
            "data.dirichlet=0.3",
            "data.partition_args={min_size=12}",
            "data.samples_per_agent=40",
            "data.agents=20",
        ]
        data = load_config({}, overrides).data
        split = build_split(data, build_samples(data), seed=3)
        sizes = [len(split.train[a]) + len(split.test[a]) for a in split.agents]
        assert sum(sizes) == 800 and min(sizes) >= 12 and len(set(sizes)) > 5
