"""Updates are checked and added as they arrive: same bits in any order, memory of constant size."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nufed.algorithms import GMeta
from nufed.algorithms.aggregation import Mean, Median
from nufed.algorithms.fixed_point import PIECE, fixed_point_mean
from nufed.algorithms.protocol import Context
from nufed.server import Progress, Rules, close_round, open_round
from nufed.server.rounds import kept_bytes, warn_of_memory
from support import context, update

BEFORE = {"model": torch.zeros(3)}


def close(changes, *, factor=None, medians=None, algorithm=None, order=None):
    algorithm, rules = algorithm or GMeta(), Rules(max_update_norm=factor)
    incoming = open_round(
        algorithm, Progress(4, BEFORE, medians=medians or {}), context(5), rules=rules
    )
    for agent in order or range(len(changes)):
        incoming.add(update(agent, torch.tensor([changes[agent], 0.0, 0.0])))
    server, rejected = close_round(algorithm, BEFORE, incoming, context(5), rules=rules)
    return float(server["model"][0]), [r.agent for r in rejected], incoming.medians


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_updates_that_arrive_in_any_order_have_the_mean_of_all(dtype):
    torch.manual_seed(0)
    w = torch.randn(PIECE + 5, dtype=torch.float64).to(dtype)
    vectors = [(w + 0.01 * torch.randn_like(w)).to(dtype) for _ in range(5)]
    right = fixed_point_mean(vectors, w)
    for seed in range(3):
        incoming = open_round(GMeta(), Progress(4, {"model": w}), context(5))
        for agent in random.Random(seed).sample(range(5), 5):
            incoming.add(update(agent, vectors[agent]))
        server, _ = close_round(GMeta(), {"model": w}, incoming, context(5))
        assert torch.equal(server["model"], right)


def test_the_larger_median_of_this_round_and_the_last_bounds_norms():
    changes = [1.0, 2.0, 3.0, 50.0]  # the median is 2
    assert close(changes, factor=3.0) == (2.0, [3], {"model": 2.0})
    assert close(changes, factor=3.0, medians={"model": 1.0}) == (2.0, [3], {"model": 2.0})
    assert close(changes, factor=3.0, medians={"model": 17.0}) == (14.0, [], {"model": 2.0})
    # all changes grew at once: the bound follows
    assert close([100.0, 110.0, 120.0], factor=3.0, medians={"model": 1.0})[1] == []
    # too few for a median: the last one stays
    assert close([1.0, 50.0], factor=3.0, medians={"model": 1.0}) == (25.5, [], {"model": 1.0})


@pytest.mark.parametrize("medians", [{}, {"model": 1.0}, {"model": 20.0}])
def test_neither_the_order_nor_the_sum_changes_what_is_rejected(medians):
    @dataclass(frozen=True, kw_only=True)
    class KeepsAll(GMeta):
        def server_update(self, context, server, updates):
            return super().server_update(context, server, [*updates])

    rng = random.Random(1)
    changes = [rng.lognormvariate(0, 1.5) for _ in range(9)]
    right = close(changes, factor=2.0, medians=medians, algorithm=KeepsAll())
    assert 0 < len(right[1]) < 9 or medians == {"model": 20.0}
    for seed in range(5):
        order = random.Random(seed).sample(range(9), 9)
        assert close(changes, factor=2.0, medians=medians, order=order) == right


def test_an_algorithm_that_reads_single_updates_gets_them():
    """Whether means suffice is tried before single updates are dropped."""

    @dataclass(frozen=True, kw_only=True)
    class Largest(GMeta):
        def server_update(self, context, server, updates):
            return {"model": max((u.vectors["model"] for u in updates), key=lambda v: v[0])}

    assert close([1.0, 7.0, 3.0], algorithm=Largest())[0] == 7.0


def test_a_rule_that_needs_all_updates_says_how_much_memory(caplog):
    server, cohort = {"model": torch.zeros(1000)}, Context(1, 50, 20)
    median, weighted = GMeta(aggregation=Median()), GMeta(aggregation=Mean("samples"))
    assert [kept_bytes(a, server, cohort) for a in (GMeta(), median, weighted)] == [0, 80e3, 80e3]
    for algorithm in (GMeta(), median):
        warn_of_memory("mine", algorithm, server, cohort, available=79_999)
    (line,) = caplog.messages
    assert line.startswith("mine: the server keeps all 20 updates of a round")
    warn_of_memory("mine", median, server, cohort, available=80_000)
    assert len(caplog.messages) == 1


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_the_servers_memory_does_not_grow_with_the_cohort(monkeypatch):
    """The sum in float64, two models, and the update that is added; the median keeps all."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent.parent / "benchmarks")
    import large_cohort

    size = {"updates": 12, "numbers": 2_000_000}
    mean = large_cohort.in_own_process(**size, max_update_norm=100.0)
    assert mean["peak_in_models"] < 4  # 3, and buffers of a few MB
    assert large_cohort.in_own_process(**size, rule="median")["peak_in_models"] > 12
