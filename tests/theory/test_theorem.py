"""The explicit theorem against whole training runs; the printed one against a counterexample."""

import math
from functools import partial

import numpy as np
import pytest
from families import Bowls, Noise, meta_gradient, meta_value, true_gradient
from hypothesis import given, strategies as st

from nufed import theory
from nufed.theory import (
    BatchSizes,
    FalseBoundWarning,
    GradientError,
    ProblemConstants,
    TheoryError,
    Training,
)

CONSTANTS = ProblemConstants(2.0, 1.5, 0.7, 0.9, 0.4, 1.1, 0.3, 0.6, 0.2)


def run(problem, training, alpha, batches, kind, fd_step, start, repeats=60, seed=0):
    """‖∇F(w_k)‖² of the server's models, for every repeat and round."""
    rng, noise = np.random.default_rng(seed), Noise(seed)
    agents, tau = problem.agents, training.local_steps
    w = np.tile(np.asarray(start, dtype=float), (repeats, 1))
    norms = []
    for _ in range(training.rounds):
        here = np.repeat(w[:, None], agents, axis=1)
        average = true_gradient(problem, here, alpha, batches.steps).mean(axis=1)
        norms.append((average**2).sum(axis=1))
        local = here
        for _ in range(tau):
            step = meta_gradient(problem, local, alpha, batches, noise, kind, fd_step)
            local = local - training.meta_lr * step
        picked = np.argsort(rng.random((repeats, agents)), axis=1)[:, : training.cohort]
        w = np.take_along_axis(local, picked[..., None], axis=1).mean(axis=1)
    return np.array(norms).T


ERRORS = {
    "exact": lambda c, a, b: theory.exact_error(c, a, b),
    "first_order": lambda c, a, b: theory.first_order_error(c, a, b),
    "hessian_free": lambda c, a, b: theory.hessian_free_error(c, a, b, 0.05),
}


@pytest.mark.parametrize("kind", ERRORS)
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1.0, 0.2]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 10**6),
)
def test_the_explicit_theorem_holds_for_whole_runs(
    kind, agents, dimensions, steps, tau, below, spread, seed
):
    rng = np.random.default_rng(seed)
    problem = Bowls(spread * rng.normal(size=(agents, dimensions)), jitter=spread)
    constants, alpha, batches = problem.constants, 0.05, BatchSizes.equal(5, steps)
    smoothness = theory.meta_smoothness(constants, alpha, steps)
    training = Training(
        meta_lr=below * theory.largest_meta_lr(smoothness, tau),
        local_steps=tau,
        rounds=40,
        cohort=int(rng.integers(1, agents + 1)),
        agents=agents,
    )
    start = 2 * rng.normal(size=dimensions)
    at_start = np.broadcast_to(start, (1, agents, dimensions))
    gap = meta_value(problem, at_start, alpha, steps).mean()  # F* is not below 0
    bound = theory.convergence_bound(
        training,
        smoothness,
        ERRORS[kind](constants, alpha, batches),
        theory.meta_dissimilarity(constants, alpha, steps),
        gap,
    )
    means = run(problem, training, alpha, batches, kind, 0.05, start, seed=seed).mean(axis=1)
    assert means.mean() - 5 * means.std() / math.sqrt(len(means)) <= bound.total * (1 + 1e-9)


def seesaw(tau, b, gamma=0.1):
    """Two agents pulling in opposite directions, one of them a round; β = b/τ."""
    problem = Bowls(np.array([[-gamma], [gamma]]))
    rounds = int(60 / b)
    training = Training(b / tau, tau, rounds, cohort=1, agents=2)
    norms = run(problem, training, 0.0, BatchSizes.equal(1, 0), "exact", 0.0, [0.0], repeats=40)
    return problem, training, norms[:, rounds // 2 :].mean()


def test_the_printed_theorem_lacks_a_factor_tau_in_the_sampling_of_agents():
    """Whatever O(1) is, some problem needs more: the needed constant grows as 1/b and with τ."""
    needed = []
    for tau, b in [(10, 0.1), (40, 0.02)]:
        problem, training, measured = seesaw(tau, b)
        none = GradientError(0.0, 0.0)
        gamma = problem.constants.gradient_dissimilarity
        with pytest.warns(FalseBoundWarning, match="false with some agents"):
            printed = theory.printed_bound(training, 1.0, none, gamma, 0.0, constant=1.0)
        needed.append(measured / printed.total)
        explicit = theory.convergence_bound(training, 1.0, none, gamma, 0.0)
        assert measured <= explicit.total
        assert measured > 0.2 * explicit.agent_sampling  # and the term is of the right size
    assert needed[1] > 3 * needed[0] > 3


def test_the_explicit_form_is_below_the_simple_one():
    """3.3, 4.8, 15, 5, 5 as constants: a cruder count of the same proof."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        agents = int(rng.integers(2, 50))
        training = Training(
            1.0, int(rng.integers(1, 20)), 50, int(rng.integers(1, agents + 1)), agents
        )
        smoothness = rng.uniform(0.001, 1) / (10 * training.local_steps)
        mu, gamma, gap = 10 ** rng.uniform(-3, 2, size=3)
        sigma = mu * 10 ** rng.uniform(0, 2)
        error = GradientError(mu, sigma**2)
        found = theory.convergence_bound(training, smoothness, error, gamma, gap).total
        tau, m, step = training.local_steps, training.cohort, training.meta_lr * smoothness
        simple = (
            3.3 * gap / (tau * training.rounds)
            + 4.8 * mu**2
            + 15 * step**2 * (tau - 1) ** 2 * (sigma**2 + gamma**2)
            + 5 * step * (tau * training.sampling * gamma**2 + sigma**2 / m)
        )
        assert found <= simple


def test_terms_vanish_where_they_should():
    error, smoothness = GradientError(0.3, 4.0), 2.0
    training = Training(0.001, 1, 100, 5, 5)
    terms = theory.convergence_bound(training, smoothness, error, 7.0, 1.0)
    assert terms.drift_dissimilarity == terms.drift_noise == terms.agent_sampling == 0
    assert terms.gradient_noise > 0 and terms.bias > 0
    unbiased = theory.convergence_bound(training, smoothness, GradientError(0.0, 0.0), 7.0, 1.0)
    assert unbiased.total == unbiased.initial_gap == pytest.approx(1 / (0.001 * 100), rel=0.01)


@pytest.mark.parametrize("name", ["smoothness", "bias", "second_moment", "dissimilarity", "gap"])
def test_the_theorem_is_monotone(name):
    values = {
        "smoothness": 1.0,
        "bias": 0.2,
        "second_moment": 0.9,
        "dissimilarity": 0.5,
        "gap": 1.0,
    }

    def total(smoothness, bias, second_moment, dissimilarity, gap):
        error = GradientError(bias, second_moment)
        training = Training(0.01, 3, 100, 2, 7)
        return theory.convergence_bound(training, smoothness, error, dissimilarity, gap).total

    assert total(**{**values, name: 1.5 * values[name]}) > total(**values)


def exact_schedule(epsilon, cohort):
    return theory.schedule(
        epsilon,
        CONSTANTS,
        0.05,
        2,
        error=partial(theory.exact_error, CONSTANTS, 0.05),
        initial_gap=3.0,
        agents=10,
        cohort=cohort,
    )


@pytest.mark.parametrize(("cohort", "power"), [(10, 1.5), (3, 2.0)])
def test_the_schedule_reaches_its_target_at_the_stated_rate(cohort, power):
    plans = [exact_schedule(epsilon, cohort) for epsilon in (1e-2, 1e-4)]
    assert [plan.terms.total <= e for plan, e in zip(plans, (1e-2, 1e-4), strict=True)] == [
        True
    ] * 2
    assert plans[0].terms.total > 0.9e-2  # and not by far
    rate = math.log(plans[1].training.rounds / plans[0].training.rounds) / math.log(100)
    assert rate == pytest.approx(power, abs=0.2)
    assert plans[1].batch_size / plans[0].batch_size <= 2 * 100  # D = O(1/ε)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-10])
def test_the_schedule_reaches_tiny_targets(epsilon):
    plan = exact_schedule(epsilon, cohort=3)
    assert 0.5 * epsilon < plan.terms.total <= epsilon


def test_the_schedule_reaches_what_the_bias_of_first_order_allows():
    error = partial(theory.first_order_error, CONSTANTS, 0.01)
    floor = error(BatchSizes.equal(2**49, 2)).bias ** 2
    plan = theory.schedule(
        1.5 * floor, CONSTANTS, 0.01, 2, error=error, initial_gap=3.0, agents=5, cohort=5
    )
    assert floor < plan.terms.total <= 1.5 * floor


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Training(0.0, 1, 1, 1, 1), "meta_lr = 0.0"),
        (lambda: Training(0.1, 0, 1, 1, 1), "local_steps = 0"),
        (lambda: Training(0.1, 1, 1, 3, 2), r"cohort = 3: must lie in 1 … 2"),
        (
            lambda: theory.convergence_bound(
                Training(0.1, 4, 1, 1, 1), 1.0, GradientError(0, 0), 0.0, 1.0
            ),
            r"meta_lr = 0.1: Theorem 1 holds up to 1/\(10τL_F\) = 0.025",
        ),
        (
            lambda: theory.schedule(
                1e-3,
                CONSTANTS,
                0.1,
                2,
                error=partial(theory.first_order_error, CONSTANTS, 0.1),
                initial_gap=1.0,
                agents=5,
                cohort=5,
            ),
            "can't be guaranteed with any batch size",
        ),
    ],
)
def test_values_outside_the_conditions_are_refused(call, message):
    with pytest.raises(TheoryError, match=message):
        call()
