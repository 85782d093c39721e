"""Paired differences and their verdicts."""

import math

import numpy as np
import pytest
from paper.differences import Difference

from nufed.lab.runs.results import Estimate


def difference(mean, seeds, agents=0.0):
    return Difference(Estimate(mean, seeds), Estimate(mean, agents))


def test_a_paired_difference_has_an_interval_over_seeds_and_one_over_agents():
    rng = np.random.default_rng(0)
    agents = rng.normal(size=(4, 30))  # what two methods share cancels
    shift = np.array([0.1, 0.2, 0.3, 0.4])[:, None]
    found = Difference.paired(agents + shift, agents)
    assert found.mean == pytest.approx(0.25)
    assert found.over_seeds.half_width == pytest.approx(3.182 * np.std([1, 2, 3, 4], ddof=1) / 20)
    spread = np.std(np.repeat([0.1, 0.2, 0.3, 0.4], 30), ddof=1) / math.sqrt(120)
    assert found.over_agents.half_width == pytest.approx(1.98 * spread, rel=0.01)
    assert found.high - found.mean == pytest.approx(found.over_seeds.half_width)


@pytest.mark.parametrize(
    ("mean", "seeds", "agents", "verdict"),
    [
        (1.0, 0.5, 0.9, "held"),
        (1.0, 0.5, 1.1, "undecided"),
        (1.0, 1.1, 0.5, "undecided"),
        (-1.0, 0.5, 0.5, "not held"),
        (0.0, 0.4, 0.4, "not held"),  # any advantage is too small to be relevant
        (0.0, 0.6, 0.4, "undecided"),
    ],
)
def test_above_is_held_only_if_both_intervals_say_so(mean, seeds, agents, verdict):
    assert difference(mean, seeds, agents).above(0.5) == verdict


@pytest.mark.parametrize(
    ("mean", "seeds", "verdict"),
    [
        (0.2, 0.5, "held"),
        (-0.2, 0.5, "held"),
        (0.2, 0.9, "undecided"),
        (3.0, 0.9, "not held"),
        (-3.0, 0.9, "not held"),
    ],
)
def test_small_means_within_the_margin(mean, seeds, verdict):
    assert difference(mean, seeds).small(1.0) == verdict


def test_one_seed_decides_nothing():
    found = Difference.paired(np.ones((1, 5)), np.zeros((1, 5)))
    assert found.above() == "undecided" and found.small(2.0) == "undecided"
