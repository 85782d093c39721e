"""The privacy loss with secret cohorts: never below the truth, rarely far above it.

Everything here is computed in other ways than in the source: densities of mixtures on a line, and
compositions whose losses are rounded down.
"""

import itertools
import math
import re
from pathlib import Path

import dp_accounting as dp
import numpy as np
import pytest
from scipy.special import ndtr

from nufed.flower.app.epsilon import (
    Round,
    divergence,
    max_releases,
    released_epsilon,
    sampled_epsilon,
    server_epsilon,
)

DELTA = 1e-5
DOCS = Path(__file__).parents[3] / "docs"
SIZES = [(50, 10), (50, 1), (10, 4), (10, 9), (1000, 100)]


def hockey_stick(order, p, q, width):
    return float(np.maximum(p - order * q, 0).sum() * width)


def worst_case(mu, rate, rounds, delta, points=1000):
    """Lower bound on epsilon if all others send -C and the replaced site C, then -C.

    The larger of both directions. Losses are rounded down to a grid before they are added up.
    """
    edges = np.linspace(-9, mu + 9, 20_001)
    without = np.diff(ndtr(edges))
    with_site = (1 - rate) * without + rate * np.diff(ndtr(edges - mu))
    ratio = np.log(1 - rate + rate * np.exp(mu * edges - mu**2 / 2))
    step = (ratio[-1] - ratio[0]) / points
    directions = [(with_site, ratio[:-1]), (without, -ratio[1:])]
    return max(composed_epsilon(*each, step, rounds, delta) for each in directions)


def composed_epsilon(mass, losses, step, rounds, delta):
    grid = np.floor(losses / step).astype(int)
    once = np.bincount(grid - grid.min(), weights=mass)
    size = rounds * (len(once) - 1) + 1
    length = 2 ** math.ceil(math.log2(size))
    many = np.fft.irfft(np.fft.rfft(once, length) ** rounds, length)[:size]
    losses = (np.arange(size) + rounds * grid.min()) * step
    many, losses = (array[(losses > 0) & (many > 1e-15)] for array in (many, losses))
    low, high = 0.0, 1000.0
    for _ in range(30):
        middle = (low + high) / 2
        exceeds = many @ np.maximum(-np.expm1(middle - losses), 0) > delta
        low, high = (middle, high) if exceeds else (low, middle)
    return low


def renyi_epsilon(noise, agents, cohort, rounds, delta):
    """The bound of Wang, Balle & Kasiviswanathan 2019, theorem 27."""
    event = dp.GaussianDpEvent(noise * math.sqrt(cohort) / 2)
    event = dp.SampledWithoutReplacementDpEvent(agents, cohort, event)
    orders = [1 + i / 10 for i in range(1, 100)] + list(range(11, 33))
    accountant = dp.rdp.RdpAccountant(orders, dp.NeighboringRelation.REPLACE_ONE)
    return accountant.compose(event, rounds).get_epsilon(delta)


def mixture(updates, cohort, noise, x):
    """The density of the noisy sum of a uniform cohort of updates on a line."""
    sums = [sum(each) for each in itertools.combinations(updates, cohort)]
    z = (x[:, None] - np.array(sums)) / (noise * math.sqrt(cohort))
    return np.exp(-(z**2) / 2).mean(axis=1) / (noise * math.sqrt(2 * math.pi * cohort))


@pytest.mark.parametrize(("agents", "cohort"), [(2, 1), (5, 2), (6, 5)])
@pytest.mark.parametrize("noise", [0.4, 1.5])
def test_no_replaced_update_among_any_others_exceeds_the_divergence(agents, cohort, noise):
    generator = np.random.default_rng(agents)
    x = np.linspace(-cohort - 9 * noise * cohort, cohort + 9 * noise * cohort, 20_001)
    mu, width = 2 / (noise * math.sqrt(cohort)), x[1] - x[0]
    worst = 0.0
    for trial in range(12):
        others = list(generator.uniform(-1, 1, agents - 1) if trial else -np.ones(agents - 1))
        here, there = generator.uniform(-1, 1, 2) if trial else (1.0, -1.0)
        p = mixture([here, *others], cohort, noise, x)
        q = mixture([there, *others], cohort, noise, x)
        for loss in np.linspace(-2, 2, 9):
            bound = float(divergence(mu, cohort / agents, np.array(loss)))
            for one, other in ((p, q), (q, p)):
                true = hockey_stick(math.exp(loss), one, other, width)
                assert true <= bound + 1e-6
                worst = max(worst, true / bound)
    assert worst > 1 - 1e-5, "one round's bound is attained"


@pytest.mark.parametrize(("mu", "rate"), [(0.1, 0.02), (0.6, 0.2), (3.0, 0.5), (1.0, 1.0)])
def test_the_divergence_is_that_of_one_symmetric_pair(mu, rate):
    x = np.linspace(-12, mu + 12, 400_001)
    far, near = (np.exp(-((x - c) ** 2) / 2) / math.sqrt(2 * math.pi) for c in (mu, 0.0))
    right = x > mu / 2
    p = np.where(right, rate * far + (1 - rate) * near, far)
    q = np.where(right, near, (1 - rate) * far + rate * near)
    atom = (1 - rate) * (2 * ndtr(mu / 2) - 1)  # the rest of both, with a loss of 0
    width = x[1] - x[0]
    assert p.sum() * width + atom == pytest.approx(1, abs=1e-5)
    for loss in (-1.0, -0.1, 0.0, 0.05, 0.7, 2.0):
        order = math.exp(loss)
        pair = hockey_stick(order, p, q, width) + max(0.0, 1 - order) * atom
        assert float(divergence(mu, rate, np.array(loss))) == pytest.approx(pair, abs=1e-5)


@pytest.mark.parametrize(("agents", "cohort"), SIZES)
@pytest.mark.parametrize("noise", [0.7, 2.0, 6.0])
def test_epsilon_is_between_the_explicit_worst_case_and_the_renyi_bound(agents, cohort, noise):
    for rounds, delta in ((1, 1e-5), (60, 1e-5), (20, 1e-8)):
        stated = released_epsilon(noise, {Round(agents, cohort, cohort): rounds}, delta)
        mu = 2 / (noise * math.sqrt(cohort))
        true = worst_case(mu, cohort / agents, rounds, delta)
        assert 0 < true <= stated <= 1.4 * true + 0.002
        if 2 * cohort < agents:
            assert stated <= renyi_epsilon(noise, agents, cohort, rounds, delta)


@pytest.mark.parametrize(
    ("noise", "stated", "explicit"), [(1.0, 7.63, 6.99), (2.0, 2.95, 2.79), (5.0, 0.99, 0.960)]
)
def test_epsilon_of_the_example_in_the_documentation(noise, stated, explicit):
    epsilon = released_epsilon(noise, {Round(50, 10, 10): 100}, DELTA)
    assert stated - 0.01 < epsilon <= stated  # an upper bound is rounded up
    assert f"{stated:.2f}" in (DOCS / "accounting.md").read_text("utf-8")
    below = worst_case(2 / (noise * math.sqrt(10)), 0.2, 100, DELTA, points=4000)
    assert 0.99 * explicit < below < explicit < epsilon


def test_the_table_of_epsilon_in_the_documentation_is_rounded_up():
    page = (DOCS / "privacy.md").read_text("utf-8")
    row = r"^\| (\d+), (\d+), (\d+): (released|server)[^|]*\| (.*) \| (.*) \| (.*) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert len(rows) == 5
    for agents, cohort, rounds, kind, *stated in rows:
        n, m, k = int(agents), int(cohort), int(rounds)
        updates = k if n == m else max_releases(n, m, k)
        for noise, number in zip((1.0, 2.0, 5.0), stated, strict=True):
            if kind == "server":
                epsilon = server_epsilon(noise, updates, 1e-5)
            else:
                epsilon = released_epsilon(noise, {Round(n, m, m): k}, 1e-5)
            unit = 10.0 ** -len(number.partition(".")[2])
            assert float(number) - unit < epsilon <= float(number)


def test_every_epsilon_in_the_text_is_rounded_up():
    """Dropouts, known cohorts, and secure aggregation, for the first row of the table."""
    page = (DOCS / "privacy.md").read_text("utf-8")

    def stated(pattern):
        return [float(n) for n in re.findall(r"\d+(?:\.\d+)?", re.search(pattern, page)[1])]

    def up(value):  # to one digit
        return math.ceil(10 * value) / 10

    def in_sum(accepted):
        rounds = {Round(accepted, accepted, accepted): max_releases(50, 10, 100)}
        return [up(released_epsilon(noise, rounds, 1e-5)) for noise in (1, 2, 5)]

    lost = [released_epsilon(2, {Round(50, 10, taken): 100}, 1e-5) for taken in (10, 9, 5)]
    raised = stated(r"raise (\S+ \(noise 2\) to \S+,\s+5 of 10 to \S+)\. ")
    assert [raised[0], raised[2], raised[-1]] == list(map(up, lost))
    assert stated(r"cohorts are known,\s+the first row above is (.*?) \(38") == in_sum(10)
    assert stated(r"100 rounds ([\d.,\s]+and [\d.]+) instead") == in_sum(7)
    assert stated(r"the sums of 10 would give (.*?)\)") == in_sum(10)
    alone = [server_epsilon(noise, max_releases(50, 10, 100), 1e-5) for noise in (1, 2, 5)]
    assert stated(r"instead of ([\d.,\s]+and [\d.]+) \(if") == [128, *map(up, alone[1:])]
    assert alone[0] <= 128


@pytest.mark.parametrize("mu", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("rounds", [1, 10, 300])
def test_without_sampling_it_is_the_gaussian_one_rounded_up(mu, rounds):
    exact = dp.get_epsilon_gaussian(1 / (mu * math.sqrt(rounds)), DELTA)
    if exact < 400:
        assert exact <= sampled_epsilon({(mu, 1.0): rounds}, DELTA) < 1.003 * exact


def test_epsilon_rises_with_every_round_and_falls_with_noise_on_any_grid():
    by_rounds = [released_epsilon(1.5, {Round(20, 5, 5): n}, DELTA) for n in range(1, 30)]
    assert all(a < b for a, b in itertools.pairwise(by_rounds))
    noises = np.linspace(0.3, 6, 40)
    by_noise = [released_epsilon(z, {Round(20, 5, 5): 50}, DELTA) for z in noises]
    assert all(a > b for a, b in itertools.pairwise(by_noise))
    by_cohort = [sampled_epsilon({(0.5, m / 20): 10}, DELTA) for m in range(1, 21)]
    assert all(a < b for a, b in itertools.pairwise(by_cohort))


def test_rounds_with_and_without_dropouts_compose():
    full, fewer = Round(20, 5, 5), Round(20, 5, 2)
    each = [released_epsilon(2.0, {full: n, fewer: 10 - n}, DELTA) for n in range(11)]
    assert all(a > b for a, b in itertools.pairwise(each))
    assert each[10] == released_epsilon(2.0, {full: 10}, DELTA)


def test_where_it_can_not_be_computed_the_gaussian_bound_stays():
    exact = dp.get_epsilon_gaussian(math.sqrt(5 / 4 / 10) * 2.0, 1e-12)
    assert released_epsilon(2.0, {Round(20, 5, 5): 10}, 1e-12) == pytest.approx(exact)
    for noise in (0.01, 0.1):  # losses beyond the range of double precision
        assert sampled_epsilon({(2 / noise, 0.5): 100}, DELTA) == math.inf
        assert 500 < released_epsilon(noise, {Round(2, 1, 1): 100}, DELTA) < math.inf
    assert sampled_epsilon({(20.0, 1e-7): 3}, DELTA) == 0.0, "a site is picked too rarely"
