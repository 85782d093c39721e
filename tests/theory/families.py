"""Problems whose constants are known exactly, simulated without torch, many repeats at once.

Arrays have the shape (repeats, agents, dimensions); every function is a sum over coordinates.
"""

from dataclasses import dataclass

import numpy as np

from nufed.theory import BatchSizes, ProblemConstants

GRID = np.linspace(-np.pi, np.pi, 4001)


@dataclass(frozen=True)
class Waves:
    """∂f_i/∂w_j = offset_ij + (L/k)·sin(k·w_j + phase_ij), ρ = Lk.

    One sample adds ξ_j·jitter + ζ_j·(wobble/k)·sin(k·w_j) to the gradient, with signs ξ, ζ.
    """

    offset: np.ndarray
    phase: np.ndarray
    smooth: float = 1.0
    k: float = 1.0
    jitter: float = 0.0
    wobble: float = 0.0

    @property
    def agents(self):
        return len(self.offset)

    @property
    def dimensions(self):
        return self.offset.shape[1]

    @property
    def constants(self):
        n, amplitude = self.dimensions, self.smooth / self.k
        gradients = [self.offset + amplitude * np.sin(x + self.phase) for x in GRID]
        hessians = [self.smooth * np.cos(x + self.phase) for x in GRID]
        largest = np.max(np.abs(gradients), axis=0)  # (agents, dimensions)
        return ProblemConstants(
            gradient=float(np.linalg.norm(largest, axis=1).max()),
            smoothness=self.smooth,
            hessian_lipschitz=self.smooth * self.k,
            gradient_noise=np.sqrt(n * (self.jitter**2 + (self.wobble / self.k) ** 2)),
            hessian_noise=self.wobble,  # spectral; its Frobenius norm is √n larger
            gradient_kurtosis=n**2 * (self.jitter + self.wobble / self.k) ** 4,
            hessian_kurtosis=n**2 * self.wobble**4,
            gradient_dissimilarity=float(np.sqrt(np.var(gradients, axis=1).max(axis=0).sum())),
            hessian_dissimilarity=float(np.sqrt(np.var(hessians, axis=1).max(axis=0).sum())),
        )

    def gradient(self, w, noise=(0.0, 0.0)):
        xi, zeta = noise
        amplitude = self.smooth / self.k
        true = self.offset + amplitude * np.sin(self.k * w + self.phase)
        return true + self.jitter * xi + zeta * self.wobble / self.k * np.sin(self.k * w)

    def hessian(self, w, noise=(0.0, 0.0)):
        curvature = self.smooth * np.cos(self.k * w + self.phase)
        return curvature + noise[1] * self.wobble * np.cos(self.k * w)

    def value(self, w):
        waves = -self.smooth / self.k**2 * np.cos(self.k * w + self.phase)
        return (self.offset * w + waves).sum(axis=-1)


@dataclass(frozen=True)
class Bowls:
    """f_i(w) = Σ_j L·(√(1 + (w_j − centre_ij)²) − 1), bounded below by 0; noise as in Waves."""

    centre: np.ndarray
    smooth: float = 1.0
    jitter: float = 0.0

    @property
    def agents(self):
        return len(self.centre)

    @property
    def dimensions(self):
        return self.centre.shape[1]

    @property
    def constants(self):
        n, bend = self.dimensions, 1.5 / 1.25**2.5  # the largest third derivative, at 1/2
        apart = float(np.sqrt(self.centre.var(axis=0).sum()))
        return ProblemConstants(
            gradient=self.smooth * np.sqrt(n),
            smoothness=self.smooth,
            hessian_lipschitz=self.smooth * bend,
            gradient_noise=np.sqrt(n) * self.jitter,
            hessian_noise=0.0,
            gradient_kurtosis=n**2 * self.jitter**4,
            hessian_kurtosis=0.0,
            gradient_dissimilarity=self.smooth * apart,
            hessian_dissimilarity=self.smooth * bend * apart,
        )

    def gradient(self, w, noise=(0.0, 0.0)):
        x = w - self.centre
        return self.smooth * x / np.sqrt(1 + x**2) + self.jitter * noise[0]

    def hessian(self, w, noise=(0.0, 0.0)):
        return self.smooth * (1 + (w - self.centre) ** 2) ** -1.5

    def value(self, w):
        return self.smooth * (np.sqrt(1 + (w - self.centre) ** 2) - 1).sum(axis=-1)


class NoNoise:
    """Replaces a random generator where the true gradient is wanted."""

    def signs(self, size, shape):
        return 0.0, 0.0


class Noise:
    """Means of a batch's random signs, drawn from a seed."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def signs(self, size, shape):
        return tuple(2 * self.rng.binomial(size, 0.5, shape) / size - 1 for _ in range(2))


class EverySign:
    """Every combination of the signs of the draws once, for exact means: 4 per draw of a sample."""

    def __init__(self):
        self.drawn = 0

    def signs(self, size, shape):
        assert size == 1 and shape[1:] == (1, 1)
        bits = [np.arange(shape[0]) >> self.drawn + i & 1 for i in range(2)]
        self.drawn += 2
        assert 2**self.drawn <= shape[0]
        return tuple((2.0 * b - 1).reshape(shape) for b in bits)


def iterates(problem, w, alpha, batches, noise):
    models = [w]
    for size in batches.adapt:
        drawn = noise.signs(size, w.shape)
        models.append(models[-1] - alpha * problem.gradient(models[-1], drawn))
    return models


def meta_gradient(problem, w, alpha, batches, noise, kind="exact", fd_step=0.0):
    """One stochastic meta-gradient for every repeat and agent."""
    *models, last = iterates(problem, w, alpha, batches, noise)
    d = problem.gradient(last, noise.signs(batches.outer, w.shape))
    if kind == "first_order":
        return d
    for model, size in zip(reversed(models), reversed(batches.curvature), strict=True):
        drawn = noise.signs(size, w.shape)
        if kind == "exact":
            d = d - alpha * problem.hessian(model, drawn) * d
        else:
            ahead = problem.gradient(model + fd_step * d, drawn)
            behind = problem.gradient(model - fd_step * d, drawn)
            d = d - alpha * (ahead - behind) / (2 * fd_step)
    return d


def true_gradient(problem, w, alpha, steps):
    """∇F_i(w), for every repeat and agent."""
    return meta_gradient(problem, w, alpha, BatchSizes.equal(1, steps), NoNoise())


def meta_value(problem, w, alpha, steps):
    """F_i(w), for every repeat and agent."""
    return problem.value(iterates(problem, w, alpha, BatchSizes.equal(1, steps), NoNoise())[-1])


def at_least(samples, errors=5.0):
    """The mean of samples, less five standard errors: a true mean is hardly ever below."""
    return samples.mean() - errors * samples.std() / np.sqrt(len(samples))


def measured_error(problem, w, alpha, batches, kind, fd_step=0.0, repeats=4000, seed=0):
    """Bias and second moment of a meta-gradient at the point w of agent 0, from below."""
    many = np.broadcast_to(w, (repeats, problem.agents, problem.dimensions))
    sampled = meta_gradient(problem, many, alpha, batches, Noise(seed), kind, fd_step)[:, 0]
    off = sampled - true_gradient(problem, w[None, None], alpha, batches.steps)[0, 0]
    error = np.sqrt((off.var(axis=0) / repeats).sum())
    return max(0.0, np.linalg.norm(off.mean(axis=0)) - 5 * error), at_least((off**2).sum(axis=1))
