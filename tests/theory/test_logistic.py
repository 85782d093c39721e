"""The bounds on logistic regression, whose Hessians are full matrices and whose noise is real."""

import math

import numpy as np
import pytest

from nufed import theory
from nufed.theory import BatchSizes, ProblemConstants

REPEATS = 3000


class Logistic:
    """Agents with labelled points; ℓ = log(1 + exp(−y·x·w)), batches drawn with replacement."""

    def __init__(self, seed, agents=3, points=12, dimensions=2, apart=0.5):
        rng = np.random.default_rng(seed)
        centre = apart * rng.normal(size=(agents, 1, dimensions))
        x = rng.normal(size=(agents, points, dimensions)) + centre
        y = np.where(rng.random((agents, points, 1)) < 0.7, 1.0, -1.0)
        self.z, self.rng = x * y, rng

    @property
    def constants(self):
        norms = np.linalg.norm(self.z, axis=2)  # every derivative of σ is bounded by a number
        curvature = [np.linalg.norm(z.T @ z / len(z), 2) / 4 for z in self.z]
        return ProblemConstants(
            gradient=norms.mean(axis=1).max(),
            smoothness=max(curvature),
            hessian_lipschitz=(norms**3).mean(axis=1).max() / (6 * math.sqrt(3)),
            gradient_noise=math.sqrt((norms**2).mean(axis=1).max()),
            hessian_noise=math.sqrt((norms**4).mean(axis=1).max()) / 4,
            gradient_kurtosis=16 * (norms**4).mean(axis=1).max(),
            hessian_kurtosis=16 * (norms**8).mean(axis=1).max() / 256,
            gradient_dissimilarity=2 * norms.mean(axis=1).max(),
            hessian_dissimilarity=2 * max(curvature),
        )

    def batch(self, agent, size):
        """Points for every repeat: all of them, or ``size`` drawn at random."""
        if size is None:
            return np.broadcast_to(self.z[agent], (REPEATS, *self.z[agent].shape))
        return self.z[agent][self.rng.integers(len(self.z[agent]), size=(REPEATS, size))]

    @staticmethod
    def gradient(w, z):
        weight = 1 / (1 + np.exp(np.einsum("rsd,rd->rs", z, w)))
        return -np.einsum("rs,rsd->rd", weight, z) / z.shape[1]

    @staticmethod
    def product(w, z, v):
        p = 1 / (1 + np.exp(np.einsum("rsd,rd->rs", z, w)))
        along = p * (1 - p) * np.einsum("rsd,rd->rs", z, v)
        return np.einsum("rs,rsd->rd", along, z) / z.shape[1]

    def meta_gradient(self, w, agent, alpha, steps, size, kind="exact", fd_step=0.0):
        models = [np.broadcast_to(w, (REPEATS, len(w)))]
        for _ in range(steps):
            models.append(models[-1] - alpha * self.gradient(models[-1], self.batch(agent, size)))
        d = self.gradient(models.pop(), self.batch(agent, size))
        for model in reversed(models):
            if kind == "first_order":
                break
            z = self.batch(agent, size)
            if kind == "exact":
                d = d - alpha * self.product(model, z, d)
            else:
                ahead, behind = (self.gradient(model + s * fd_step * d, z) for s in (1, -1))
                d = d - alpha * (ahead - behind) / (2 * fd_step)
        return d


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("seed", range(3))
def test_the_bounds_hold_on_logistic_regression(seed, steps):
    problem = Logistic(seed)
    constants, alpha, size = problem.constants, 0.3, 3
    batches = BatchSizes.equal(size, steps)
    errors = {
        "exact": theory.exact_error(constants, alpha, batches),
        "first_order": theory.first_order_error(constants, alpha, batches),
        "hessian_free": theory.hessian_free_error(constants, alpha, batches, 0.1),
    }
    smoothness = theory.meta_smoothness(constants, alpha, steps)
    for w in np.random.default_rng(seed).normal(size=(2, 2)):
        true = problem.meta_gradient(w, 0, alpha, steps, None)[0]
        moved = w + 1e-3 * np.array([0.6, 0.8])
        there = problem.meta_gradient(moved, 0, alpha, steps, None)[0]
        assert np.linalg.norm(there - true) <= smoothness * 1e-3
        for kind, bound in errors.items():
            off = problem.meta_gradient(w, 0, alpha, steps, size, kind, 0.1) - true
            chance = 5 * math.sqrt(off.var(axis=0).sum() / REPEATS)
            assert np.linalg.norm(off.mean(axis=0)) - chance <= bound.bias
            squares = (off**2).sum(axis=1)
            assert squares.mean() - 5 * squares.std() / math.sqrt(REPEATS) <= bound.second_moment
