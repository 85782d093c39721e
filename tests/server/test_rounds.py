import pytest
import torch

from nufed.algorithms import GMeta
from nufed.algorithms.protocol import AgentUpdate
from nufed.errors import TrainingError
from nufed.server import choose_cohort
from nufed.server.incoming import screen
from support import context, round_of, update

EXPECTED = {"model": torch.zeros(3)}


def test_a_round_equals_the_round_without_the_bad_agent():
    algorithm, server = GMeta(), {"model": torch.zeros(3)}
    good = [update(1), update(3)]
    bad = update(2, torch.full((3,), float("nan")))
    with_bad, rejected = round_of(algorithm, server, [bad, *good], context(5))
    without, none = round_of(algorithm, server, good, context(5))
    assert torch.equal(with_bad["model"], without["model"])
    assert [r.agent for r in rejected] == [2] and not none


def test_a_round_without_any_usable_update_stops_training():
    bad = update(2, torch.full((3,), float("nan")))
    with pytest.raises(TrainingError, match=r"round 5 .*agent 2.*not finite.*lower meta_lr"):
        round_of(GMeta(), {"model": torch.zeros(3)}, [bad], context(5))


def test_the_cohort_is_uniform_without_replacement_and_of_the_right_size():
    agents = list(range(100, 110))
    cohorts = [choose_cohort(agents, 0.3, seed=0, round=k) for k in range(3000)]
    assert all(len(set(c)) == 3 and c == sorted(c) for c in cohorts)
    counts = torch.bincount(torch.tensor(cohorts).flatten() - 100)
    # 900 expected each; five standard deviations of a binomial
    assert (counts - 900).abs().max() < 5 * (3000 * 0.3 * 0.7) ** 0.5
    assert len(choose_cohort(agents, 0.01, 0, 0)) == 1
    assert choose_cohort(agents, 1.0, 0, 0) == agents


def test_the_norm_of_every_vector_is_checked_separately():
    """A small vector beside a large one, where the joint norm would hide its change."""
    expected = {"model": torch.zeros(2), "rates": torch.zeros(1)}
    changes = [(100.0, 1.0), (110.0, 1.1), (90.0, 50.0), (2000.0, 0.9)]
    updates = [
        AgentUpdate(i, 5, 1, {"model": torch.tensor([x, 0.0]), "rates": torch.tensor([y])})
        for i, (x, y) in enumerate(changes)
    ]
    accepted, rejected = screen(updates, expected, 5, max_norm=3.0)
    assert [u.agent for u in accepted] == [0, 1]
    assert {(r.agent, r.reason.partition(" has ")[0]) for r in rejected} == {
        (2, "its change of 'rates'"),
        (3, "its change"),
    }
    assert screen(updates, expected, 5, max_norm=0.1)[0] == []
