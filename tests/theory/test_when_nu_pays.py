"""What training for ν steps finds on quadratics: closed forms, matrices, nufed's training."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from nufed import Exact, FirstOrder, MetaBatch, Objective, fedavg, gmeta, meta_gradient
from nufed.simulation import DirectEngine, train
from nufed.theory import Direction, TheoryError, Weighting, largest_gap, small_spread_gap
from support import Point, quadratic_loss, quadratics

CURVATURES, OPTIMA = (0.25, 0.5, 1.25), (1.0, -2.0, 0.5)  # exact in float32
ALPHA, ROUNDS = 0.4, 70


def trained(algorithm, agents):
    """The model that nufed ends at, on ½(w − x_i)ᵀA_i(w − x_i) for every agent (A_i, x_i)."""
    data, _ = quadratics(len(agents), len(agents[0][1]))
    rows = [torch.cat([torch.tensor(a).flatten(), torch.tensor(x)]) for a, x in agents]
    data.samples.inputs.copy_(torch.stack(rows).repeat_interleave(4, dim=0))
    engine = DirectEngine(Objective(Point(len(agents[0][1])), quadratic_loss), data, seed=0)
    start = engine.objective.initial()
    *_, last = train(algorithm, engine, start, rounds=ROUNDS, participation=1.0)
    return last.server["model"].numpy()


def scalars():
    return [([[c]], [x]) for c, x in zip(CURVATURES, OPTIMA, strict=True)]


def check_gmeta_ends_at_the_stationary_model(cls):
    direction = Direction(CURVATURES, OPTIMA)
    for update, curvature in (("exact", Exact()), ("first_order", FirstOrder())):
        for nu in (1, 3):
            settings = {"adapt_lr": ALPHA, "local_steps": 1, "batch_size": 3, "meta_lr": 3.0}
            found = trained(gmeta(adapt_steps=nu, curvature=curvature, **settings), scalars())
            right = direction.stationary(cls(nu, ALPHA, update))
            assert found == pytest.approx(right, abs=1e-8), (update, nu)


def check_local_updates_flatten_the_weights(cls):
    direction = Direction(CURVATURES, OPTIMA)
    for tau, beta in ((1, 0.7), (5, 0.5)):
        found = trained(fedavg(local_steps=tau, batch_size=3, meta_lr=beta), scalars())
        right = direction.stationary(cls(0, local_steps=tau, beta=beta))
        assert found == pytest.approx(right, abs=1e-8), tau
    settings = {"adapt_lr": ALPHA, "local_steps": 4, "batch_size": 3, "meta_lr": 0.5}
    found = trained(gmeta(adapt_steps=2, **settings), scalars())
    right = direction.stationary(cls(2, ALPHA, local_steps=4, beta=0.5))
    assert found == pytest.approx(right, abs=1e-8)


CHECKS = (check_gmeta_ends_at_the_stationary_model, check_local_updates_flatten_the_weights)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_nufed_ends_at_the_stationary_model(check):
    check(Weighting)


class OncePerStep(Weighting):
    """Wrong: the exact meta-gradient of ν steps has 2ν factors, not ν."""

    def weight(self, curvature):
        return curvature * (1 - self.alpha * curvature) ** self.steps


class SquaredFirstOrder(Weighting):
    """Wrong: the first-order one has no product of Hessians."""

    def weight(self, curvature):
        return curvature * (1 - self.alpha * curvature) ** (2 * self.steps)


class OneLocalUpdate(Weighting):
    """Wrong: the weight of one local update whatever their number."""

    def weight(self, curvature):
        power = self.steps * (2 if self.update == "exact" else 1)
        return curvature * (1 - self.alpha * curvature) ** power


@pytest.mark.parametrize(
    ("wrong", "check"),
    [(OncePerStep, CHECKS[0]), (SquaredFirstOrder, CHECKS[0]), (OneLocalUpdate, CHECKS[1])],
)
def test_wrong_weights_are_rejected(wrong, check):
    with pytest.raises(AssertionError):
        check(wrong)


def test_any_hessians_have_the_same_formula_as_matrices():
    """A(I − αA)^{2ν} and A(I − αA)^ν, for Hessians that do not commute."""
    _, pairs = quadratics()
    pairs = [(a.numpy() / 8, x.numpy()) for a, x in pairs]
    a, b = pairs[0][0], pairs[1][0]
    assert np.abs(a @ b - b @ a).max() > 0.1
    data = [(torch.tensor(np.append(a.ravel(), x))[None], torch.zeros(1)) for a, x in pairs]
    objective = Objective(Point(3), quadratic_loss)
    for curvature, times in ((Exact(), 2), (FirstOrder(), 1)):
        for nu in (0, 1, 4):
            weights = [
                a @ np.linalg.matrix_power(np.eye(3) - 0.3 * a, times * nu) for a, _ in pairs
            ]
            targets = sum(w @ x for w, (_, x) in zip(weights, pairs, strict=True))
            right = torch.tensor(np.linalg.solve(sum(weights), targets))
            found = sum(
                meta_gradient(
                    objective,
                    right,
                    MetaBatch([batch] * nu, batch, [batch] * nu),
                    lr=0.3,
                    curvature=curvature,
                )
                for batch in data
            )
            assert found.norm() < 1e-12 < 1e-3 < (right - torch.tensor(pairs[0][1])).norm()


positive = st.floats(0.05, 1.0)
agents = st.lists(st.tuples(positive, st.floats(-2, 2)), min_size=2, max_size=6, unique=True)


@given(agents, st.integers(0, 6), st.integers(0, 6), st.floats(0.05, 0.6))
def test_the_gap_is_a_ratio_of_losses_and_its_factors_multiply_to_it(pairs, nu, steps, alpha):
    direction = Direction(*zip(*pairs, strict=True))
    ours, best = (direction.stationary(Weighting(n, alpha)) for n in (nu, steps))
    least = direction.loss(best, steps, alpha)
    gap = direction.gap(Weighting(nu, alpha), steps, alpha)
    if least > 1e-6:
        assert direction.loss(ours, steps, alpha) / least == pytest.approx(gap, rel=1e-6)
        spread, correlation = direction.factors(Weighting(nu, alpha), steps, alpha)
        assert 1 + spread * correlation == pytest.approx(gap, rel=1e-6)
        low, high = min(direction.curvatures), max(direction.curvatures)
        assert gap <= largest_gap(low, high, nu, steps, alpha) * (1 + 1e-9)
        assert correlation <= 1 + 1e-9


def test_two_types_reach_the_largest_gap():
    """Where each type has half of the weight in training for ν steps."""
    low, high, alpha, nu, steps = 0.1, 1.0, 0.5, 1, 3
    p = [Weighting(nu, alpha).weight(c) for c in (low, high)]
    many = round(1000 * p[1] / p[0])  # of type low, for 1000 of type high
    direction = Direction([low] * many + [high] * 1000, [0.0] * many + [1.0] * 1000)
    bound = largest_gap(low, high, nu, steps, alpha)
    assert direction.gap(Weighting(nu, alpha), steps, alpha) == pytest.approx(bound, rel=1e-5)
    weaker = largest_gap(low, 0.98 * high, nu, steps, alpha)
    assert direction.gap(Weighting(nu, alpha), steps, alpha) > weaker


def test_the_gap_is_of_second_order_in_the_spread_of_curvature():
    for width in (0.1, 0.01):
        curvatures = [0.5 + width * c for c in (-1, -0.5, 0.1, 0.6, 0.8)]
        direction = Direction(curvatures, [1.0, 3.0, 0.0, -1.0, -2.0])
        correlation = math.sqrt(direction.factors(Weighting(1, 0.5), 3, 0.5)[1])
        mean, spread = statistics.fmean(curvatures), statistics.pstdev(curvatures)
        found = direction.gap(Weighting(1, 0.5), 3, 0.5) - 1
        predicted = small_spread_gap(mean, spread, correlation, 1, 3, 0.5) - 1
        assert found == pytest.approx(predicted, rel=4 * width)


def test_equal_curvatures_or_uncorrelated_optima_give_no_gap():
    same = Direction([0.5] * 4, [0.0, 1.0, 5.0, 2.0])
    both = Direction([0.2, 0.2, 0.9, 0.9], [-1.0, 1.0, -1.0, 1.0])
    for direction in (same, both):
        for weighting in (Weighting(0), Weighting(1, 0.5), Weighting(0, local_steps=9, beta=0.5)):
            assert direction.gap(weighting, 10, 0.5) == pytest.approx(1, abs=1e-12)
    unequal = Direction([0.2, 0.2, 0.9, 0.9], [-1.0, 1.0, -1.0, 2.0])
    assert unequal.gap(Weighting(0), 10, 0.5) > 1.01


def test_weights_on_few_agents_average_less_noise():
    """Noise in optima moves w_p by a variance of 1/effective_agents."""
    curvatures = [0.02, 0.2, 0.4, 0.6, 0.8, 1.0]
    for weighting in (Weighting(0), Weighting(5, 0.9)):
        moved = [
            Direction(curvatures, [float(i == j) for i in range(6)]).stationary(weighting)
            for j in range(6)
        ]
        right = 1 / sum(m * m for m in moved)
        found = Direction(curvatures, [0.0] * 6).effective_agents(weighting)
        assert found == pytest.approx(right)
    assert found < 2.5 < 4 < Direction(curvatures, [0.0] * 6).effective_agents(Weighting(0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Weighting(-1), "steps = -1: must be 0 or more"),
        (lambda: Weighting(1, math.nan), "alpha = nan"),
        (lambda: Weighting(0, local_steps=0), "local_steps = 0"),
        (lambda: Direction([], []), "at least one agent"),
        (lambda: Direction([1.0], [1.0, 2.0]), "must hold 1 numbers"),
        (lambda: Direction([0.0], [1.0]), "must be above 0"),
        (lambda: Direction([2.0], [1.0]).stationary(Weighting(1, 0.5)), "above 0 in sum"),
        (lambda: largest_gap(0.1, 2.0, 1, 3, 0.5), "must be below 1/steepest = 0.5"),
        (lambda: largest_gap(2.0, 1.0, 1, 3, 0.1), "must be 0 … steepest"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(TheoryError) as error:
        make()
    assert words in str(error.value)
