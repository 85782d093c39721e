"""FedNova: fixed points in closed form, equal steps are FedAvg's, and its formulas."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from nufed import Federation, Objective, fedavg
from nufed.algorithms import FedNova
from nufed.algorithms.aggregation import Mean
from nufed.algorithms.local_optimizer import SGD, Nesterov
from nufed.algorithms.protocol import AgentUpdate, Context
from nufed.data import as_samples, make_split
from nufed.simulation import BatchedEngine, DirectEngine, train
from support import Point, agent_context, federation, mlp, quadratic_loss, uneven_federation

SHARED = {"meta_lr": 0.1, "local_steps": 3, "batch_size": 6}
EPOCHS = {"meta_lr": 0.1, "local_epochs": 2, "batch_size": 6}
STEPS = (1, 2, 5)


def uneven_quadratics():
    """Three agents of 1, 2 and 5 batches of three samples, with full batches of their losses."""
    generator = torch.Generator().manual_seed(4)
    rows, pairs = [], []
    for steps in STEPS:
        root = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        a = root @ root.T + 0.5 * torch.eye(3, dtype=torch.float64)
        b = 3 * torch.randn(3, generator=generator, dtype=torch.float64)
        pairs.append((a, b))
        rows += [torch.cat([a.flatten(), b])] * (4 * steps)
    places = np.split(np.arange(len(rows)), np.cumsum([4 * steps for steps in STEPS])[:-1])
    split = make_split(places, 0, validation=0.0, test=0.25)
    return Federation(as_samples((torch.stack(rows), torch.zeros(len(rows)))), split), pairs


def fixed_point(algorithm):
    """Of a round with all agents, which on quadratics is an affine map of w."""
    data, _ = uneven_quadratics()
    engine = DirectEngine(Objective(Point(3), quadratic_loss), data, seed=0)

    def after_a_round(w):
        return list(train(algorithm, engine, w, rounds=1, participation=1.0))[-1].server["model"]

    eye = torch.eye(3, dtype=torch.float64)
    constant = after_a_round(torch.zeros_like(eye[0]))
    linear = torch.stack([after_a_round(e) - constant for e in eye], dim=1)
    return torch.linalg.solve(eye - linear, constant)


def mean_of_minima(weights):
    """(ΣC_i)⁻¹·ΣC_i·b_i."""
    _, pairs = uneven_quadratics()
    total = sum(c @ b for c, (_, b) in zip(weights, pairs, strict=True))
    return torch.linalg.solve(sum(weights), total)


def path(a, eta, steps):
    """I − (I − ηA)^τ: w − y is this times w − b."""
    eye = torch.eye(3, dtype=torch.float64)
    return eye - torch.linalg.matrix_power(eye - eta * a, steps)


def check_its_fixed_point(cls):
    """With weights (I − (I − ηA_i)^τ_i)/(ητ_i), and FedAvg's without τ_i."""
    curvatures, settings = [a for a, _ in uneven_quadratics()[1]], {"local_epochs": 1}
    settings |= {"meta_lr": 0.05, "batch_size": 3}
    paths = [path(a, 0.05, steps) for a, steps in zip(curvatures, STEPS, strict=True)]
    nova = mean_of_minima([c / steps for c, steps in zip(paths, STEPS, strict=True)])
    found = fixed_point(cls(**settings))
    torch.testing.assert_close(found, nova, rtol=0, atol=1e-9)
    average = fixed_point(fedavg(**settings))
    torch.testing.assert_close(average, mean_of_minima(paths), rtol=0, atol=1e-9)
    assert float((nova - average).norm()) > 0.1


def check_small_steps_reach_the_optimum(cls):
    """As η → 0 the error falls like η; FedAvg tends to the optimum with weights τ_i."""
    curvatures, settings = [a for a, _ in uneven_quadratics()[1]], {"local_epochs": 1}
    weighted = mean_of_minima([steps * a for a, steps in zip(curvatures, STEPS, strict=True)])
    for algorithm, limit in ((cls, mean_of_minima(curvatures)), (fedavg, weighted)):
        errors = []
        for eta in (0.004, 0.002, 0.001):
            settings |= {"meta_lr": eta, "batch_size": 3}
            found = fixed_point(algorithm(**settings))
            errors.append(float((found - limit).norm()))
        ratios = [larger / smaller for larger, smaller in pairwise(errors)]
        assert all(1.8 < ratio < 2.2 for ratio in ratios), ratios


def check_equal_steps_are_fedavg(cls, kind=DirectEngine, **other):
    """To rounding, over rounds with a part of the agents."""
    engine = kind(Objective(mlp()), federation(), 5)
    w, settings = engine.objective.initial(), {**SHARED, **other}
    both = [
        list(train(algorithm, engine, w, rounds=3, participation=0.5))
        for algorithm in (cls(**settings), fedavg(**settings))
    ]
    for one, right in zip(*both, strict=True):
        torch.testing.assert_close(one.server["model"], right.server["model"], rtol=0, atol=1e-13)
    assert not torch.equal(right.server["model"], w)


def check_rounds_are_the_formula(cls):
    """Against a loop over rounds and agents of several sizes, by uniform and sample weights."""
    data = uneven_federation(unseen=0)
    engine = DirectEngine(Objective(mlp()), data, 5)
    objective, w = engine.objective, engine.objective.initial()
    for averaging in ("uniform", "samples"):
        algorithm = cls(aggregation=Mean(averaging), **EPOCHS)
        rounds = list(train(algorithm, engine, w, rounds=3, participation=0.7))
        for before, progress in pairwise(rounds):
            start, changes, taken, weights = before.server["model"], [], [], []
            for agent in progress.cohort:
                source, y = data.batches(agent, 5, "train", progress.round), start
                batches = [b for epoch in range(2) for b in source.epoch("outer", 6, epoch)]
                for batch in batches:
                    y = y - 0.1 * objective.grad(y, batch)
                changes.append((start - y) / len(batches))
                taken.append(len(batches))
                weights.append(source.samples if averaging == "samples" else 1)
            p = torch.tensor(weights, dtype=torch.float64) / sum(weights)
            effective = float(p @ torch.tensor(taken, dtype=torch.float64))
            right = start - effective * (p @ torch.stack(changes))
            torch.testing.assert_close(progress.server["model"], right, rtol=0, atol=1e-13)
        assert len(set(taken)) > 1 and progress.cost.gradients == sum(taken)


def check_momentum_weights(cls):
    """‖a_i‖₁ of the paper, from coefficients of every gradient; weight decay does not enter."""
    own = agent_context(Objective(mlp()), federation().batches(0, 0, "train", 1))

    def found(sgd, steps):
        return cls(optimizer=sgd, **SHARED).path_length(own, steps)

    decayed = SGD(momentum=0.9, weight_decay=0.1, clip_norm=0.5, schedule="cosine")
    for steps in (1, 2, 7):
        sums = [sum(0.9**j for j in range(k)) for k in range(1, steps + 1)]
        assert found(SGD(), steps) == steps
        assert found(decayed, steps) == pytest.approx(sum(sums), rel=1e-12)
        ahead = [1 + 0.9 * each for each in sums]
        assert found(Nesterov(), steps) == pytest.approx(sum(ahead), rel=1e-12)


def check_running_statistics_are_averaged(cls):
    """As they are: neither the agent nor the server scales them."""
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()
    objective, data = Objective(net, running_stats="tracked"), uneven_federation()
    w, counted = objective.initial(), objective.counted()
    updates, ends = [], []
    for agent in (0, 2):
        batches = data.batches(agent, seed=0, use="train", round=1)
        own = replace(agent_context(objective, batches), samples=batches.samples)
        vectors = cls(**EPOCHS).agent_update(own, {"model": w}, {}).vectors
        updates.append(AgentUpdate(agent, 1, 9, vectors))
        ends.append(fedavg(**EPOCHS).agent_update(own, {"model": w}, {}).vectors["model"])
    context = Context(1, 2, 2, counted={"model": counted})
    server = {"model": w, "steps": torch.ones(1, dtype=w.dtype)}
    after = cls(**EPOCHS).server_update(context, server, updates)["model"]
    right = torch.stack(ends).mean(0)
    torch.testing.assert_close(after[counted:], right[counted:], rtol=0, atol=1e-13)
    assert not torch.allclose(after[:counted], right[:counted], rtol=0, atol=1e-4)


CHECKS = (
    check_its_fixed_point,
    check_small_steps_reach_the_optimum,
    check_equal_steps_are_fedavg,
    check_rounds_are_the_formula,
    check_momentum_weights,
    check_running_statistics_are_averaged,
)
FIXED, LIMIT, FEDAVG, ROUNDS, MOMENTUM, STATISTICS = CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_proof(check):
    check(FedNova)


def test_equal_steps_are_fedavg_on_a_stack_and_with_momentum():
    check_equal_steps_are_fedavg(FedNova, BatchedEngine)
    check_equal_steps_are_fedavg(FedNova, optimizer=SGD(momentum=0.5))


# wrong implementations


class IsFedAvg(FedNova):
    """Changes are not normalised."""

    def path_length(self, context, steps):
        return 1.0


class WithoutEffectiveSteps(FedNova):
    """w ← w − mean(d_i)."""

    def server_update(self, context, server, updates):
        mean = self.aggregate(context, updates, "model", server["model"])
        return {**server, "model": mean}


class StepsOfTheSettings(FedNova):
    """a_i is local_steps, whatever steps the agent took."""

    def path_length(self, context, steps):
        return super().path_length(context, self.local_steps)


class CountsStepsWithMomentum(FedNova):
    def path_length(self, context, steps):
        return float(steps)


class LongerWithFewAgents(FedNova):
    """The mean of d_i times N/|cohort|, as in FedLab."""

    def server_update(self, context, server, updates):
        after, w = super().server_update(context, server, updates), server["model"]
        scale = context.agents / len(updates)
        return {**after, "model": w + scale * (after["model"] - w)}


class StepsOfTheLastRound(FedNova):
    def server_update(self, context, server, updates):
        after, w = super().server_update(context, server, updates), server["model"]
        change = (after["model"] - w) / after["steps"] * server["steps"]
        return {**after, "model": w + change}


class StatisticsAreNormalised(FedNova):
    def server_update(self, context, server, updates):
        return super().server_update(replace(context, counted={}), server, updates)


MUTANTS = {
    IsFedAvg: (FIXED, LIMIT, ROUNDS),
    WithoutEffectiveSteps: (FEDAVG, ROUNDS),
    StepsOfTheSettings: (FIXED, LIMIT, ROUNDS),
    CountsStepsWithMomentum: (MOMENTUM,),
    LongerWithFewAgents: (FEDAVG, ROUNDS),
    StepsOfTheLastRound: (FEDAVG, ROUNDS),
    StatisticsAreNormalised: (STATISTICS,),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_wrong_copy_is_rejected(mutant):
    for check in MUTANTS[mutant]:
        with pytest.raises(AssertionError):
            check(mutant)
