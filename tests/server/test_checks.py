import pytest
import torch

from nufed.server.incoming import screen
from support import update

EXPECTED = {"model": torch.zeros(3)}


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
        (update(0), "duplicate update"),
    ],
)
def test_an_invalid_update_is_rejected_and_named(bad, reason):
    good = [update(2), update(0)]
    accepted, rejected = screen([bad, *good] if bad.agent else [*good, bad], EXPECTED, round=5)
    assert [u.agent for u in accepted] == [0, 2]
    (error,) = rejected
    assert (error.agent, error.round) == (bad.agent, 5)
    assert reason in error.reason and f"agent {bad.agent}, round 5" in str(error)


def test_agents_outside_the_cohort_and_absurd_sample_counts_are_rejected():
    updates = [update(1), update(2, samples=10**18), update(3), update(4, samples=10**9)]
    accepted, rejected = screen(updates, EXPECTED, 5, cohort=[1, 2, 4])
    assert [u.agent for u in accepted] == [1, 4]
    assert [(r.agent, r.reason.split(",")[0]) for r in rejected] == [
        (2, "its number of samples is 1000000000000000000"),
        (3, "it is not in this round's cohort"),
    ]


def test_changes_with_a_norm_far_above_the_median_are_rejected():
    norms = [1.0, 2.0, 3.0, 50.0]
    updates = [update(i, torch.tensor([x, 0.0, 0.0])) for i, x in enumerate(norms)]
    accepted, rejected = screen(updates, EXPECTED, 5, max_norm=3.0)  # torch's median is 2
    assert [u.agent for u in accepted] == [0, 1, 2]
    assert "norm 50, above 3 times the median" in rejected[0].reason
    without, _ = screen(updates, EXPECTED, 5)
    assert len(without) == 4


@pytest.mark.parametrize("norms", [[50.0], [1.0, 50.0], [0.0, 50.0]])
def test_of_two_norms_none_is_rejected(norms):
    """The median of two is one of them: an unchanged model would reject the other agent."""
    updates = [update(i, torch.tensor([x, 0.0, 0.0])) for i, x in enumerate(norms)]
    accepted, rejected = screen(updates, EXPECTED, 5, max_norm=3.0)
    assert len(accepted) == len(norms) and rejected == []
