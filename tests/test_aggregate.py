import pytest
import torch

from nufed.aggregate import ClippedMean, Mean, Median, TrimmedMean, average, screen
from nufed.algorithm import ClientUpdate
from nufed.algorithms import GMeta
from nufed.errors import InputError, TrainingError
from nufed.server import choose_cohort, close_round

EXPECTED = {"model": torch.zeros(3)}


def update(agent=0, vector=None, round=5, samples=10, **other):
    vectors = {"model": torch.full((3,), float(agent)) if vector is None else vector, **other}
    return ClientUpdate(agent, round, samples, vectors)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (update(1, torch.zeros(4)), "shape (4,) instead of (3,)"),
        (update(1, torch.zeros(3, dtype=torch.float64)), "dtype torch.float64"),
        (update(1, torch.tensor([0.0, float("nan"), 0.0])), "not finite"),
        (update(1, torch.tensor([0.0, float("-inf"), 0.0])), "not finite"),
        (update(1, round=4), "of round 4"),
        (update(1, samples=0), "samples is 0"),
        (update(1, samples=-3), "samples is -3"),
        (update(1, samples=float("nan")), "samples is nan"),
        (update(1, extra=torch.zeros(3)), "['extra', 'model'] instead of ['model']"),
        (update(0), "second update"),
    ],
)
def test_a_bad_update_is_left_out_and_named(bad, reason):
    good = [update(2), update(0)]
    accepted, rejected = screen([bad, *good] if bad.agent else [*good, bad], EXPECTED, round=5)
    assert [u.agent for u in accepted] == [0, 2]
    (error,) = rejected
    assert (error.agent, error.round) == (bad.agent, 5)
    assert reason in error.reason and f"agent {bad.agent}, round 5" in str(error)


def test_a_round_equals_the_round_without_the_bad_agent():
    algorithm, server = GMeta(), {"model": torch.zeros(3)}
    good = [update(1), update(3)]
    bad = update(2, torch.full((3,), float("nan")))
    with_bad, rejected = close_round(algorithm, server, [bad, *good], 5)
    without, none = close_round(algorithm, server, good, 5)
    assert torch.equal(with_bad["model"], without["model"])
    assert [r.agent for r in rejected] == [2] and not none


def test_a_round_without_any_usable_update_stops_training():
    bad = update(2, torch.full((3,), float("nan")))
    with pytest.raises(TrainingError, match=r"round 5 .*agent 2.*not finite.*lower meta_lr"):
        close_round(GMeta(), {"model": torch.zeros(3)}, [bad], 5)


def test_averages():
    updates = [
        update(0, torch.tensor([0.0, 1.0, 2.0]), samples=1),
        update(1, torch.ones(3), samples=3),
    ]
    assert torch.equal(average(updates, "model", "uniform"), torch.tensor([0.5, 1.0, 1.5]))
    assert torch.equal(average(updates, "model", "samples"), torch.tensor([0.75, 1.0, 1.25]))


def test_the_cohort_is_uniform_without_replacement_and_of_the_right_size():
    agents = list(range(100, 110))
    cohorts = [choose_cohort(agents, 0.3, seed=0, round=k) for k in range(3000)]
    assert all(len(set(c)) == 3 and c == sorted(c) for c in cohorts)
    counts = torch.bincount(torch.tensor(cohorts).flatten() - 100)
    # 900 expected each; five standard deviations of a binomial
    assert (counts - 900).abs().max() < 5 * (3000 * 0.3 * 0.7) ** 0.5
    assert len(choose_cohort(agents, 0.01, 0, 0)) == 1
    assert choose_cohort(agents, 1.0, 0, 0) == agents


def test_averages_of_half_precision_do_not_lose_terms():
    ones = [update(i, torch.ones(3, dtype=torch.bfloat16), samples=800) for i in range(400)]
    for how in ("uniform", "samples"):
        mean = average(ones, "model", how)
        assert mean.dtype == torch.bfloat16 and torch.equal(mean, ones[0].vectors["model"])


def test_strangers_and_absurd_weights_are_left_out():
    updates = [update(1), update(2, samples=10**18), update(3), update(4, samples=10**9)]
    accepted, rejected = screen(updates, EXPECTED, 5, cohort=[1, 2, 4])
    assert [u.agent for u in accepted] == [1, 4]
    assert [(r.agent, r.reason.split(",")[0]) for r in rejected] == [
        (2, "its number of samples is 1000000000000000000"),
        (3, "it was not asked in this round"),
    ]


def test_changes_much_longer_than_the_median_are_left_out():
    lengths = [1.0, 2.0, 3.0, 50.0]
    updates = [update(i, torch.tensor([x, 0.0, 0.0])) for i, x in enumerate(lengths)]
    accepted, rejected = screen(updates, EXPECTED, 5, max_norm=3.0)  # torch's median is 2
    assert [u.agent for u in accepted] == [0, 1, 2]
    assert "length 50, above 3 times the median" in rejected[0].reason
    without, _ = screen(updates, EXPECTED, 5)
    assert len(without) == 4


def test_the_length_of_every_vector_counts_by_itself():
    """A short vector beside a long one, in which a change does not show in the length of both."""
    expected = {"model": torch.zeros(2), "rates": torch.zeros(1)}
    changes = [(100.0, 1.0), (110.0, 1.1), (90.0, 50.0), (2000.0, 0.9)]
    updates = [
        ClientUpdate(i, 5, 1, {"model": torch.tensor([x, 0.0]), "rates": torch.tensor([y])})
        for i, (x, y) in enumerate(changes)
    ]
    accepted, rejected = screen(updates, expected, 5, max_norm=3.0)
    assert [u.agent for u in accepted] == [0, 1]
    assert {(r.agent, r.reason.partition(" has ")[0]) for r in rejected} == {
        (2, "its change of 'rates'"),
        (3, "its change"),
    }
    assert screen(updates, expected, 5, max_norm=0.1)[0] == []


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
