import pytest
import torch

from nufed.algorithms.aggregation import ClippedMean, Mean, Median, TrimmedMean
from nufed.errors import InputError
from support import update

EXPECTED = {"model": torch.zeros(3)}


def test_averages():
    updates = [
        update(0, torch.tensor([0.0, 1.0, 2.0]), samples=1),
        update(1, torch.ones(3), samples=3),
    ]
    for how, mean in (("uniform", [0.5, 1.0, 1.5]), ("samples", [0.75, 1.0, 1.25])):
        assert torch.equal(Mean(how).combine(updates, "model", torch.zeros(3)), torch.tensor(mean))


def test_averages_of_half_precision_do_not_lose_terms():
    ones = [update(i, torch.ones(3, dtype=torch.bfloat16), samples=800) for i in range(400)]
    for how in ("uniform", "samples"):
        mean = Mean(how).combine(ones, "model", torch.zeros(3, dtype=torch.bfloat16))
        assert mean.dtype == torch.bfloat16 and torch.equal(mean, ones[0].vectors["model"])


def vectors(*rows):
    return [update(i, torch.tensor(row)) for i, row in enumerate(rows)]


def test_robust_rules_against_closed_forms():
    rows = vectors(
        [0.0, 9.0, 1.0], [1.0, 8.0, 1.0], [2.0, 7.0, 1.0], [3.0, 6.0, 1.0], [100.0, -50.0, 1.0]
    )
    before = torch.zeros(3)
    assert torch.equal(Median().combine(rows, "model", before), torch.tensor([2.0, 7.0, 1.0]))
    even = Median().combine(rows[:4], "model", before)
    assert torch.equal(even, torch.tensor([1.5, 7.5, 1.0]))
    trimmed = TrimmedMean(0.2).combine(rows, "model", before)
    assert torch.equal(trimmed, torch.tensor([2.0, 7.0, 1.0]))
    whole = TrimmedMean(0.0).combine(rows, "model", before)
    assert torch.allclose(whole, Mean().combine(rows, "model", before))
    clipped = ClippedMean().combine(
        vectors([3.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 400.0]), "model", before
    )
    assert torch.allclose(clipped, torch.tensor([3.0, 4.0, 4.0]) / 3)
    same = ClippedMean().combine(vectors([1.0, 2.0, 3.0]), "model", torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(same, torch.tensor([1.0, 2.0, 3.0]))  # no change at all


def test_the_share_is_trimmed_as_it_is_written():
    rows = [update(agent, torch.full((3,), 1e6 * (agent < 29))) for agent in range(100)]
    assert int(0.29 * 100) == 28  # in binary
    assert not TrimmedMean(0.29).combine(rows, "model", torch.zeros(3)).any()


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.25), ClippedMean()])
def test_robust_rules_hold_below_their_breakdown_point_where_the_mean_does_not(rule):
    generator = torch.Generator().manual_seed(0)
    honest = [update(i, 1 + 0.1 * torch.randn(3, generator=generator)) for i in range(8)]
    attackers = [update(10 + i, torch.full((3,), -1e6)) for i in range(2)]
    before = torch.zeros(3)
    right = Mean().combine(honest, "model", before)
    got = rule.combine([*honest, *attackers], "model", before)
    assert (got - right).norm() < 0.8 * right.norm()
    assert (Mean().combine([*honest, *attackers], "model", before) - right).norm() > 1e5


@pytest.mark.parametrize("bad", [-0.1, 0.5, float("nan")])
def test_shares_to_trim_are_checked(bad):
    with pytest.raises(InputError, match="trim = "):
        TrimmedMean(bad)
    with pytest.raises(InputError, match=r"averaging = 'other'"):
        Mean("other")
