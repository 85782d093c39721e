"""The fixed-point sum against exact rational arithmetic."""

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nufed.algorithms import fixed_point, fixed_point as running_mean
from nufed.algorithms.aggregation import Mean
from nufed.algorithms.fixed_point import FixedPointGrid, FixedPointSum, fixed_point_mean, peak
from nufed.server.incoming import screen
from support import update

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TINY = {torch.float32: 2.0**-17, torch.float64: 2.0**-20}
MOVED = {torch.float32: (1e-7, 4.6e-6), torch.float64: (1e-13, 1.1e-9)}


def exact_mean(vectors):
    """By rational arithmetic, coordinate by coordinate."""
    columns = zip(*(v.double().tolist() for v in vectors), strict=True)
    return [sum(map(Fraction, column)) / len(vectors) for column in columns]


def wide_range(count, dtype, seed, numbers=60, most=2**15):
    """Vectors whose numbers have magnitudes from 1e-12 to ``most``, of both signs."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.rand(count, numbers, generator=rng, dtype=torch.float64)
    sign = torch.randint(0, 2, (count, numbers), generator=rng) * 2 - 1
    found = sign * 10 ** (size * (12 + torch.tensor(float(most)).log10()) - 12)
    return list(found.to(dtype).unbind())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 40])
def test_any_order_gives_the_same_bits(dtype, count):
    vectors = wide_range(count, dtype, seed=count)
    before = torch.zeros(60, dtype=dtype)
    mean = fixed_point_mean(vectors, before)
    assert mean.dtype == dtype
    for seed in range(5):
        shuffled = random.Random(seed).sample(vectors, count)
        assert torch.equal(fixed_point_mean(shuffled, before), mean)


def test_a_plain_sum_depends_on_the_order():
    vectors = wide_range(40, torch.float32, seed=40)
    sums = {tuple(sum(random.Random(s).sample(vectors, 40)).tolist()) for s in range(5)}
    assert len(sums) > 1


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.float64]),
    st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=12),
)
def test_the_error_is_half_a_unit_and_nothing_for_numbers_on_the_grid(dtype, numbers):
    before, unit = torch.zeros(1, dtype=dtype), FixedPointGrid.of(torch.zeros(1, dtype=dtype)).unit
    vectors = [torch.tensor([x], dtype=dtype) for x in numbers]
    (exact,) = exact_mean(vectors)
    found = fixed_point_mean(vectors, before)
    # the roundings of the sum and of its quotient to float64, and that to the model's precision
    eps = 2 * torch.finfo(torch.float64).eps + torch.finfo(dtype).eps * (dtype != torch.float64)
    own = Fraction(eps) * abs(exact) / 2 * (1 + Fraction(1, 1000))
    assert abs(Fraction(found.item()) - exact) <= Fraction(unit) / 2 + own
    if all(abs(x) >= TINY[dtype] or x == 0 for x in numbers):
        assert abs(Fraction(found.item()) - exact) <= own


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_error_relative_to_the_movement(dtype):
    """The bound of the module's docstring, on numbers around 0, where the grid rounds."""
    relative, least = MOVED[dtype]
    rng = torch.Generator().manual_seed(0)
    w = torch.zeros(400, dtype=dtype)
    moves = least * (1 + torch.rand(9, 400, generator=rng, dtype=torch.float64))
    vectors = list(moves.to(dtype).unbind())
    total = FixedPointSum(w)
    for vector in vectors:
        total.add(vector, peak(vector))
    found = total._grid.decode(total._sum(), 9)  # before it is rounded to float32
    for mean, exact in zip(found.tolist(), exact_mean(vectors), strict=True):
        assert abs(Fraction(mean) - exact) <= Fraction(relative) * exact * (1 + Fraction(1, 100))


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**20])
def test_the_grid_follows_the_servers_vector(scale):
    before = torch.tensor([0.1, -scale])
    grid = FixedPointGrid.of(before)
    assert grid.bound == 2.0**16 * {1.0: 1, 3.0: 4, 2.0**20: 2**20}[scale]
    assert grid.unit == grid.bound * 2.0**-56
    assert FixedPointGrid.of(before.double()).unit == grid.bound * 2.0**-88
    assert FixedPointGrid.of(before[:0]) == FixedPointGrid.of(torch.zeros(3))


def test_an_update_beyond_the_bound_is_refused_by_name():
    expected = {"model": torch.tensor([0.5, -3.0])}
    limit = 4 * 2.0**16
    good = update(1, torch.tensor([limit, -limit]))
    bad = update(2, torch.tensor([0.0, limit * 1.001]))
    accepted, (error,) = screen([good, bad], expected, round=5)
    assert [u.agent for u in accepted] == [1]
    assert error.agent == 2
    assert "above 2.6e+05, the bound of this round: it diverges" in error.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_sums_carry_into_limbs(dtype, monkeypatch):
    """Sums beyond 2⁵³ units, with carries between limbs, equal the exact ones."""
    monkeypatch.setattr(fixed_point, "CARRY_EVERY", 3)
    vectors = wide_range(50, dtype, seed=1, most=2**16)
    before = torch.zeros(60, dtype=dtype)
    found = fixed_point_mean(vectors, before)
    unit = Fraction(FixedPointGrid.of(before).unit)
    for mean, column in zip(
        found.double().tolist(), zip(*(v.tolist() for v in vectors), strict=True), strict=True
    ):
        exact = sum(round(Fraction(y) / unit) for y in column) * unit / 50
        assert abs(Fraction(mean) - exact) <= Fraction(torch.finfo(dtype).eps) * abs(exact)


def test_pieces_share_the_grid_of_the_whole_vector(monkeypatch):
    vectors = [v.reshape(3, 20) for v in wide_range(5, torch.float32, seed=4)]
    before = torch.arange(60.0).reshape(3, 20) ** 2
    whole = fixed_point_mean(vectors, before)
    monkeypatch.setattr(running_mean, "PIECE", 7)
    assert torch.equal(fixed_point_mean(vectors, before), whole)


def test_the_mean_may_be_read_at_any_time():
    vectors = wide_range(9, torch.float32, seed=2, most=2**16)
    total = FixedPointSum(torch.zeros(60))
    for count, vector in enumerate(vectors, start=1):
        total.add(vector, peak(vector))
        assert torch.equal(total.mean(), fixed_point_mean(vectors[:count], torch.zeros(60)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_the_mean_with_what_has_no_place_on_the_grid_is_not_finite(value):
    vectors = [torch.zeros(2), torch.tensor([0.0, value]), torch.ones(2)]
    assert not fixed_point_mean(vectors, torch.zeros(2)).isfinite().any()


def test_numbers_halfway_between_units_are_rounded_to_even_in_any_order():
    unit = FixedPointGrid.of(torch.zeros(1)).unit
    halves = [torch.tensor([n * unit / 2]) for n in (1, 3, 5, -1, -3, 7)]  # 0, 2, 2, 0, −2, 4
    for seed in range(5):
        shuffled = random.Random(seed).sample(halves, len(halves))
        assert fixed_point_mean(shuffled, torch.zeros(1)).item() == pytest.approx(unit, rel=1e-7)


def test_the_uniform_mean_is_the_fixed_point_mean():
    vectors = wide_range(9, torch.float32, seed=3)
    updates = [update(i, v) for i, v in enumerate(vectors)]
    before = torch.full((60,), 5.0)
    assert torch.equal(
        Mean().combine(updates, "model", before), fixed_point_mean(reversed(vectors), before)
    )
