"""Random updates: invalid ones are left out and named, valid ones give the same bits as alone."""

import random
import resource

import numpy as np
import pytest
import torch

from nufed.algorithms import GMeta
from nufed.algorithms.aggregation import ClippedMean, Mean, Median, TrimmedMean
from nufed.algorithms.protocol import AgentUpdate
from nufed.server import Rules
from support import context, round_of

RULES = [Mean(), Mean("samples"), Median(), TrimmedMean(), ClippedMean()]
SIZE, ROUND, COHORT = 40, 5, range(8)
SERVER = {"model": torch.zeros(SIZE)}
OVERSIZED = torch.zeros(1).expand(10**9)  # four gigabytes, if it were copied


def good(agent, rng):
    vector = torch.tensor([rng.gauss(0, 1) for _ in range(SIZE)])
    return AgentUpdate(agent, ROUND, rng.randint(1, 1000), {"model": vector})


def spoiled(rng, value):
    """A vector with one invalid number."""
    vector = torch.ones(SIZE)
    vector[rng.randrange(SIZE)] = value
    return vector


VECTORS = [
    lambda rng: torch.zeros(rng.choice([0, 1, SIZE - 1, SIZE + 1])),
    lambda rng: torch.zeros(1, SIZE),
    lambda rng: torch.zeros(()),
    lambda rng: OVERSIZED,
    lambda rng: torch.zeros(SIZE, dtype=rng.choice([torch.float64, torch.float16, torch.int64])),
    lambda rng: torch.zeros(SIZE, dtype=rng.choice([torch.bool, torch.complex64])),
    lambda rng: spoiled(rng, rng.choice([float("nan"), float("inf"), float("-inf")])),
    lambda rng: spoiled(rng, rng.choice([1, -1]) * 10 ** rng.uniform(20, 38)),  # overflows in a sum
    lambda rng: torch.zeros(SIZE).to_sparse(),
    lambda rng: torch.zeros(SIZE, device="meta"),
    lambda rng: rng.choice([None, 3.0, "zeros", [0.0] * SIZE, np.zeros(SIZE, np.float32)]),
]
NOT_WHOLE = [None, "7", 2.5, True, [1], float("nan"), float("inf"), torch.ones(3), b"7" * 1000]
FIELDS = {
    "samples": [0, -1, -(10**6), 10**18, 10**5000, *NOT_WHOLE],
    "round": [ROUND - 1, ROUND + 1, 0, -1, 10**5000, *NOT_WHOLE],
    "agent": [-1, max(COHORT) + 1, 10**18, 10**5000, *NOT_WHOLE],
    "vectors": [
        None,
        [],
        {},
        torch.zeros(SIZE),
        {"modle": torch.zeros(SIZE)},
        {"model": torch.zeros(SIZE), "other": OVERSIZED},
        {1: torch.zeros(SIZE), "model": torch.zeros(SIZE), None: None},
        {str(i) * 1000: torch.zeros(SIZE) for i in range(1000)},
    ],
}


def bad(rng, update):
    """An invalid variation of a valid update."""
    if rng.random() < 0.5:
        return AgentUpdate(update.agent, ROUND, update.samples, {"model": rng.choice(VECTORS)(rng)})
    field = rng.choice(list(FIELDS))
    return AgentUpdate(**{**vars(update), field: rng.choice(FIELDS[field])})


@pytest.mark.parametrize("times", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_invalid_updates_are_left_out_and_the_others_give_the_same_bits(tell, times):
    rng, made, rounds = random.Random(times), 0, 0
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while made < times:
        updates = [good(agent, rng) for agent in COHORT]
        rng.shuffle(updates)
        left = updates[: rng.randint(1, len(COHORT) - 1)]
        wrong = [bad(rng, update) for update in updates[len(left) :]]
        second = [good(rng.choice(left).agent, rng) for _ in range(rng.randint(0, 1))]
        mixed = [*rng.sample([*left, *wrong], len(updates)), *second]
        algorithm = GMeta(aggregation=rng.choice(RULES))
        rules = Rules(max_update_norm=rng.choice([None, 1e6]))
        got, rejected = round_of(
            algorithm, SERVER, mixed, context(ROUND), cohort=COHORT, rules=rules
        )
        right, none = round_of(algorithm, SERVER, left, context(ROUND), cohort=COHORT, rules=rules)
        assert len(rejected) == len(wrong) + len(second) and not none
        assert all(len(str(error)) < 500 and "\n" not in str(error) for error in rejected)
        assert torch.equal(got["model"], right["model"])
        made, rounds = made + len(rejected), rounds + 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    assert grown < 200
    tell(
        f"updates: {made:,} invalid ones in {rounds:,} rounds: none accepted, no crash, the others "
        f"gave the same bits as alone; memory grew by {grown:.0f} MB"
    )


@pytest.mark.parametrize("times", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_order_of_replies_does_not_matter(tell, times):
    rng = random.Random(0)
    updates = [good(agent, rng) for agent in COHORT]
    for rule in RULES:
        algorithm = GMeta(aggregation=rule)
        right, _ = round_of(algorithm, SERVER, updates, context(ROUND))
        assert right["model"].dtype == torch.float32
        for _ in range(times):
            shuffled = rng.sample(updates, len(updates))
            assert torch.equal(
                round_of(algorithm, SERVER, shuffled, context(ROUND))[0]["model"], right["model"]
            )
    tell(f"order: replies shuffled {times:,} times for each of {len(RULES)} rules: identical bits")
