"""Every bound against what it bounds, on problems whose constants are known."""

import math
import warnings
from dataclasses import fields, replace

import numpy as np
import pytest
from families import Noise, NoNoise, Waves, at_least, iterates, measured_error, true_gradient
from hypothesis import given, strategies as st

from nufed import theory
from nufed.theory import BatchSizes, FalseBoundWarning, ProblemConstants, TheoryError

CONSTANTS = ProblemConstants(2.0, 1.5, 0.7, 0.9, 0.4, 1.1, 0.3, 0.6, 0.2)
STEPS = range(1, 6)


@st.composite
def problems(draw):
    """Waves in 1 to 5 dimensions with 2 to 4 agents, its point, α and batch sizes."""
    agents, dimensions = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    scale = draw(st.sampled_from([0.1, 1.0, 3.0]))
    problem = Waves(
        offset=scale * rng.normal(size=(agents, dimensions)),
        phase=draw(st.sampled_from([0.0, 0.3, 3.0])) * rng.normal(size=(agents, dimensions)),
        smooth=draw(st.sampled_from([0.3, 1.0, 2.0])),
        k=draw(st.sampled_from([0.2, 1.0, 10.0])),
        jitter=draw(st.sampled_from([0.0, 0.3, 2.0])),
        wobble=draw(st.sampled_from([0.0, 0.5])),
    )
    steps = draw(st.integers(1, 5))
    sizes = [draw(st.integers(1, 40)) for _ in range(2 * steps + 1)]
    batches = BatchSizes(tuple(sizes[:steps]), sizes[steps], tuple(sizes[steps + 1 :]))
    w = rng.uniform(-np.pi, np.pi, size=dimensions) / problem.k
    return problem, w, draw(st.sampled_from([0.01, 0.1, 0.5])), batches


def frobenius(problem):
    """The constants with σ_H in the Frobenius norm, which the printed bounds need."""
    spread = problem.wobble * math.sqrt(problem.dimensions)
    return replace(problem.constants, hessian_noise=spread)


@given(problems())
def test_smoothness(case):
    problem, w, alpha, batches = case
    bound = theory.meta_smoothness(problem.constants, alpha, batches.steps)
    rng = np.random.default_rng(0)
    for size in (1e-6, 0.1, 1.0):
        there = w + size / problem.k * rng.normal(size=(200, problem.agents, problem.dimensions))
        here = np.broadcast_to(w, there.shape)
        change, apart = (
            np.linalg.norm(a - b, axis=-1)
            for a, b in (
                [true_gradient(problem, x, alpha, batches.steps) for x in (there, here)],
                [there, here],
            )
        )
        assert (change <= bound * apart * (1 + 1e-6) + 1e-12).all()


MOMENTS = {
    1: theory.iterate_error,
    2: theory.iterate_error_squared,
    4: theory.iterate_error_fourth,
}


@given(problems())
def test_iterates(case):
    problem, w, alpha, batches = case
    many = np.broadcast_to(w, (4000, problem.agents, problem.dimensions))
    sampled = iterates(problem, many, alpha, batches, Noise(1))
    true = iterates(problem, w[None, None], alpha, batches, NoNoise())
    for step in range(batches.steps + 1):
        off = (sampled[step] - true[step])[:, 0]
        distance = np.linalg.norm(off, axis=1)
        arguments = (problem.constants, alpha, batches, step)
        for variant in ("tight", "paper"):
            for power, bound in MOMENTS.items():
                assert at_least(distance**power) <= bound(*arguments, variant) + 1e-12
        error = np.sqrt((off.var(axis=0) / 4000).sum())
        assert (
            np.linalg.norm(off.mean(axis=0)) - 5 * error <= theory.iterate_bias(*arguments) + 1e-12
        )


ERRORS = {
    "exact": lambda c, a, b, variant: theory.exact_error(c, a, b, variant),
    "first_order": lambda c, a, b, variant: theory.first_order_error(c, a, b, variant),
    "hessian_free": lambda c, a, b, variant: theory.hessian_free_error(c, a, b, 0.05, variant),
}


@pytest.mark.parametrize("kind", ERRORS)
@given(problems())
def test_gradient_errors(kind, case):
    problem, w, alpha, batches = case
    bias, second = measured_error(problem, w, alpha, batches, kind, fd_step=0.05)
    tight = ERRORS[kind](problem.constants, alpha, batches, "tight")
    paper = ERRORS[kind](frobenius(problem), alpha, batches, "paper")
    for bound in (tight, paper):
        assert bias <= bound.bias + 1e-12
        assert second <= bound.second_moment + 1e-12


@given(problems())
def test_dissimilarity(case):
    problem, w, alpha, batches = case
    points = (
        w + np.random.default_rng(0).uniform(-4, 4, size=(500, 1, problem.dimensions)) / problem.k
    )
    gradients = true_gradient(problem, points, alpha, batches.steps)
    variance = gradients.var(axis=1).sum(axis=-1).max()
    bound = theory.meta_dissimilarity(problem.constants, alpha, batches.steps)
    assert math.sqrt(variance) <= bound * (1 + 1e-6)
    once = true_gradient(problem, points, alpha, 1).var(axis=1).sum(axis=-1).max()
    tight, paper = (
        theory.meta_dissimilarity(problem.constants, alpha, 1, v) for v in ("tight", "paper")
    )
    assert math.sqrt(once) <= tight * (1 + 1e-6) and tight <= paper


def counterexample(rho, steps, alpha=0.5, b=1.0):
    """Two agents f_± = h ± c·w with h′(w) = b + sin(ρw)/ρ: same curvature, other iterates."""
    c = math.pi / (2 * alpha * rho)
    problem = Waves(np.array([[b + c], [b - c]]), np.zeros((2, 1)), smooth=1.0, k=rho)
    points = np.linspace(0, 2 * math.pi, 20001)[:, None, None] / rho  # ∇F_i is periodic
    variance = true_gradient(problem, points, alpha, steps).var(axis=1).sum(axis=-1)
    return problem, points.ravel(), variance


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_lemma_4_as_printed_is_false(steps):
    ratios = []
    for rho in (100, 1000, 10_000):
        problem, _, variance = counterexample(rho, steps)
        with pytest.warns(FalseBoundWarning, match="false for ν ≥ 2"):
            printed = theory.meta_dissimilarity(problem.constants, 0.5, steps, "paper") ** 2
        assert variance.max() > printed
        assert variance.max() <= theory.meta_dissimilarity(problem.constants, 0.5, steps) ** 2
        ratios.append(variance.max() / printed)
    assert ratios[2] > 30 * ratios[1] > 900 * ratios[0]  # it grows without limit


def test_the_numbers_of_the_counterexample():
    problem, points, variance = counterexample(100, 2)
    at = variance.argmax()
    with pytest.warns(FalseBoundWarning):
        printed = theory.meta_dissimilarity(problem.constants, 0.5, 2, "paper") ** 2
    assert variance[np.abs(points - 0.039).argmin()] == pytest.approx(0.51, abs=0.01)
    assert variance[at] == pytest.approx(0.51, abs=0.02)
    assert printed == pytest.approx(0.037, abs=0.001)
    assert problem.constants.hessian_dissimilarity == 0


def test_the_mean_of_hessians_needs_the_frobenius_norm():
    """Random signs on a diagonal: the spectral norm of a mean of two is 1, not 1/√2."""
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], size=(5000, 2, 10))
    means = signs.mean(axis=1)
    assert (np.abs(signs).max(axis=2) == 1).all()  # so σ_H = 1 in the spectral norm
    spectral, frobenius = (np.abs(means).max(axis=1) ** 2).mean(), (means**2).sum(axis=1).mean()
    assert spectral > 0.99 > 1 / 2
    assert frobenius == pytest.approx(10 / 2, rel=0.05)
    # a product with an independent vector is bounded by the spectral one
    v = rng.normal(size=10)
    assert ((means * v) ** 2).sum(axis=1).mean() == pytest.approx((v**2).sum() / 2, rel=0.05)


@pytest.mark.parametrize("variant", ["tight", "paper"])
@pytest.mark.parametrize("step", range(5))
def test_closed_forms_equal_recursions(variant, step):
    batches = BatchSizes((3, 7, 2, 5), 4, (1, 2, 3, 4))
    for bound in MOMENTS.values():
        closed, recursion = (
            bound(CONSTANTS, 0.3, batches, step, variant, form) for form in ("closed", "recursion")
        )
        assert closed == pytest.approx(recursion, rel=1e-13)


def test_the_printed_lemma_4_term_by_term():
    c, alpha = CONSTANTS, 0.3
    growth = 1 + alpha * c.smoothness
    printed = [theory.product_dissimilarity(c, alpha, steps) for steps in range(4)]
    once = (alpha * c.hessian_dissimilarity) ** 2
    assert printed == pytest.approx([0, once, 4 * once * growth**2, 10 * once * growth**4])


def test_one_step_gives_the_published_constants_of_per_fedavg():
    c, alpha = CONSTANTS, 0.3
    bound = theory.meta_smoothness(c, alpha, 1)
    assert bound == pytest.approx(
        c.smoothness * (1 + alpha * c.smoothness) ** 2 + c.gradient * alpha * c.hessian_lipschitz
    )
    alpha = 1 / c.smoothness
    most = 4 * c.smoothness + c.gradient * alpha * c.hessian_lipschitz
    assert theory.meta_smoothness(c, alpha, 1) <= most * (1 + 1e-12)
    assert theory.meta_smoothness(c, alpha, 0) == c.smoothness


def everything(constants, alpha=0.3, steps=3, size=8):
    """Every bound, by name."""
    batches = BatchSizes.equal(size, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FalseBoundWarning)
        bounds = {"L_F": theory.meta_smoothness(constants, alpha, steps)}
        for variant in ("tight", "paper"):
            bounds[f"gamma {variant}"] = theory.meta_dissimilarity(constants, alpha, steps, variant)
            for kind, error in ERRORS.items():
                found = error(constants, alpha, batches, variant)
                bounds[f"mu {kind} {variant}"] = found.bias
                bounds[f"sigma {kind} {variant}"] = found.second_moment
    return bounds


@pytest.mark.parametrize("constant", [f.name for f in fields(ProblemConstants)])
def test_bounds_are_monotone_in_every_constant(constant):
    before = everything(CONSTANTS)
    after = everything(replace(CONSTANTS, **{constant: getattr(CONSTANTS, constant) * 1.1}))
    assert all(after[name] >= before[name] for name in before)
    assert any(after[name] > before[name] for name in before)


def test_tight_bounds_are_tighter():
    for alpha in (0.01, 0.3, 1.0):
        for steps in STEPS:
            bounds = everything(CONSTANTS, alpha, steps)
            for name in bounds:
                if name.endswith("tight") and name != "gamma tight":
                    assert bounds[name] <= bounds[name.replace("tight", "paper")], name


def test_the_hessian_free_bound_is_never_above_the_printed_one():
    rng = np.random.default_rng(0)
    for _ in range(300):
        values = 10 ** rng.uniform(-1, 1, size=9)
        values[5:7] = np.maximum(values[5:7], values[3:5] ** 4)  # κ ≥ σ⁴
        values[7] = min(values[7], 2 * values[0])  # γ_G ≤ 2B
        constants = ProblemConstants(*values)
        batches = BatchSizes.equal(int(rng.integers(1, 20)), int(rng.integers(1, 6)))
        for fd_step in (1e-3, 0.1, 1.0, 10.0):
            tight, paper = (
                theory.hessian_free_error(constants, 0.3, batches, fd_step, v)
                for v in ("tight", "paper")
            )
            assert tight.bias <= paper.bias and tight.second_moment <= paper.second_moment


def test_how_errors_scale():
    few, many = (everything(CONSTANTS, size=size) for size in (10, 1000))
    assert many["mu exact tight"] <= few["mu exact tight"] / 10 * (1 + 1e-9)  # μ² at least as 1/D
    once = [
        theory.exact_error(CONSTANTS, 0.3, BatchSizes.equal(size, 1)).bias for size in (10, 1000)
    ]
    assert once[1] == pytest.approx(once[0] / 100)  # with one step even μ falls as 1/D
    assert everything(CONSTANTS, alpha=1e-9)["mu first_order tight"] < 1e-7  # vanishes with α
    assert everything(CONSTANTS, alpha=1e-9)["mu first_order paper"] > 1
    steps = [
        theory.hessian_free_error(CONSTANTS, 0.3, BatchSizes.equal(8, 3), fd_step).second_moment
        for fd_step in (0.0, 1e-9)
    ]
    assert steps[1] == pytest.approx(steps[0], rel=1e-6)  # no 1/δ


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replace(CONSTANTS, smoothness=0.0), "smoothness = 0.0: must be above 0"),
        (lambda: replace(CONSTANTS, gradient=-1.0), "gradient = -1.0: must be a finite number"),
        (lambda: replace(CONSTANTS, gradient=math.nan), "gradient = nan"),
        (
            lambda: replace(CONSTANTS, gradient_kurtosis=0.6),
            r"gradient_kurtosis = 0.6: must be at least gradient_noise⁴ with gradient_noise = 0.9, "
            r".* lower gradient_noise to 0.88$",
        ),
        (
            lambda: replace(CONSTANTS, hessian_noise=0.8),
            r"hessian_kurtosis = 0.3: must be at least hessian_noise⁴ .* lower .* to 0.74$",
        ),
        (lambda: replace(CONSTANTS, gradient_noise=1e200), "gradient_kurtosis = 1.1"),
        (
            lambda: replace(CONSTANTS, gradient_dissimilarity=4.2),
            r"gradient_dissimilarity = 4.2: must be at most 2·gradient = 4, .* or raise gradient",
        ),
        (lambda: BatchSizes((1, 2), 3, (1,)), "must hold 2 sizes"),
        (lambda: BatchSizes((0,), 3, (1,)), "batch size = 0"),
        (lambda: theory.meta_smoothness(CONSTANTS, -0.1, 1), "alpha = -0.1"),
        (lambda: theory.meta_smoothness(CONSTANTS, 0.1, -1), "steps = -1"),
        (
            lambda: theory.iterate_error(CONSTANTS, 0.1, BatchSizes.equal(2, 1), 2),
            "there are 1 adaptation batches",
        ),
        (
            lambda: theory.hessian_free_error(CONSTANTS, 0.1, BatchSizes.equal(2, 1), 0.0, "paper"),
            "needs a step above 0",
        ),
    ],
)
def test_values_outside_the_conditions_are_refused(call, message):
    with pytest.raises(TheoryError, match=message):
        call()


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_noise": 0.9, "gradient_kurtosis": 0.9**4},
        {"gradient_noise": 1.23, "gradient_kurtosis": 2.25},  # 1.2251 and its fourth power, rounded
        {"gradient_noise": 1e-90, "gradient_kurtosis": 0.0},  # the fourth power underflows
        {"gradient_dissimilarity": 4.0},  # what the paper says always holds
        {"hessian_dissimilarity": 30.0},  # a Frobenius norm may be above 2L
    ],
)
def test_constants_at_the_edge_of_what_is_possible(changes):
    assert replace(CONSTANTS, **changes)


def test_why_hessian_dissimilarity_is_not_refused_below_twice_the_smoothness():
    """∇²f_i = L(I − 2e_ie_iᵀ): all of norm L, and 2L(1 − 1/N) from their mean."""
    agents = 50
    hessians = np.eye(agents) - 2 * np.einsum("ij,ik->ijk", np.eye(agents), np.eye(agents))
    from_mean = hessians - hessians.mean(axis=0)
    norms, apart = (np.linalg.norm(h, 2, axis=(1, 2)) for h in (hessians, from_mean))
    assert norms == pytest.approx(np.ones(agents))
    assert apart == pytest.approx(np.full(agents, 2 * (1 - 1 / agents)))


@given(problems())
def test_the_constants_of_problems_are_possible(case):
    """γ_G ≤ B, κ_G ≥ σ_G⁴ and κ_H ≥ σ_H⁴, whichever norm σ_H is in."""
    for constants in (case[0].constants, frobenius(case[0])):
        assert constants.gradient_dissimilarity <= constants.gradient * (1 + 1e-9)
        assert constants.gradient_kurtosis >= constants.gradient_noise**4 * (1 - 1e-9)
        assert constants.hessian_kurtosis >= constants.hessian_noise**4 * (1 - 1e-9)
