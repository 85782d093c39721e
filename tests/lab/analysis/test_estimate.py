"""Estimators on problems whose constants are known, at models where they are attained."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from nufed import Federation, FirstOrder, GMeta, HessianFree, Objective, Samples
from nufed.data import make_split
from nufed.lab.analysis.estimate import Estimator, spectral_norm, spread
from nufed.models import fcnn
from support import federation, mlp

L, K, JITTER, WOBBLE = 2.0, 3.0, 0.4, 0.6


class Waves(nn.Module):
    def __init__(self, dimensions):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dimensions, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x), -1), x


def loss(outputs, targets):
    """ℓ = Σ_j (offset + jitter·ξ)w − (L/k²)cos(kw + phase) − ζ·(wobble/k²)cos(kw)."""
    w, x = outputs
    offset, phase, xi, zeta = x.unbind(dim=1)
    waves = L * torch.cos(K * w + phase) + zeta * WOBBLE * torch.cos(K * w)
    return ((offset + JITTER * xi) * w - waves / K**2).sum(dim=1).mean()


def problem(offsets, phases):
    """Agents with samples of every sign, so that noise has mean zero exactly."""
    offsets, phases = np.atleast_2d(offsets), np.atleast_2d(phases)
    agents, n = offsets.shape
    signs = np.array([[a, b] for a in (-1, 1) for b in (-1, 1)] * 4, dtype=float)
    rows = [
        np.stack([o, p, np.full(n, xi), np.full(n, zeta)])
        for o, p in zip(offsets, phases, strict=True)
        for xi, zeta in signs
    ]
    own = np.split(np.arange(len(rows)), agents)
    samples = Samples(torch.tensor(np.array(rows)), torch.zeros(len(rows), 1))
    split = make_split(own, 0, validation=0.0, test=0.0)
    return Estimator(
        Objective(Waves(n), loss), Federation(samples, split), agents=agents, samples=99
    )


def at(*w):
    return torch.tensor(w, dtype=torch.float64)


def near(estimate, right):
    assert estimate.value == pytest.approx(right, rel=0.05)
    assert estimate.value <= right * (1 + 1e-9)  # from below


def test_bounds_of_gradient_and_curvature():
    estimator = problem([[1.0, 0.5], [0.2, -0.3]], np.zeros((2, 2)))
    steepest = at(math.pi / 2 / K, math.pi / 2 / K)
    near(estimator.gradient([steepest]), math.hypot(1 + L / K, 0.5 + L / K))
    near(estimator.smoothness([at(0.0, 1.0)]), L)
    near(estimator.smoothness([at(math.pi / K, 0.5)]), L)  # the eigenvalue −L
    assert estimator.smoothness([at(0.0, 1.0), steepest]).samples == 4


def test_change_of_curvature():
    near(problem([[0.7]], [[0.0]]).hessian_lipschitz([at(math.pi / 2 / K)]), L * K)


def test_change_of_curvature_in_many_dimensions():
    """The largest change is along one coordinate, which no random direction finds."""
    estimator = problem([np.linspace(0.1, 0.7, 12)], [np.linspace(0, 1, 12)])
    w = (math.pi / 2 - np.linspace(0, 1, 12)) / K
    w[1:] += 0.3  # only the first coordinate has the full ρ
    near(estimator.hessian_lipschitz([torch.tensor(w)]), L * K)


class RankOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(6, dtype=torch.float64))

    def forward(self, x):
        return x @ self.w


def rank_one(seed=0):
    """ℓ = sign·(x·w)²/2 with one x: A = ±xxᵀ, so σ_H = ‖x‖² and κ_H = ‖x‖⁸."""
    x = torch.tensor([[1.0, -2.0, 0.5, 0.0, 1.0, 0.3]] * 8, dtype=torch.float64)
    samples = Samples(x, torch.tensor([1.0, -1.0] * 4)[:, None].double())
    split = make_split([np.arange(8)], 0, validation=0.0, test=0.0)
    objective = Objective(RankOne(), lambda o, t: (t[:, 0] * o.square() / 2).mean())
    return Estimator(objective, Federation(samples, split), seed, agents=1, samples=8), float(
        x[0] @ x[0]
    )


def test_noise_of_hessians_that_are_not_diagonal():
    estimator, size = rank_one()
    sigma, kappa = estimator.hessian_noise([torch.zeros(6, dtype=torch.float64)], probes=40)
    assert sigma.value == pytest.approx(size, rel=1e-6)
    assert kappa.value == pytest.approx(size**4, rel=0.6)  # four probes of one sample are noisy


@pytest.mark.parametrize("seed", range(8))
def test_a_fourth_moment_is_never_below_the_square_of_the_second(seed):
    """Four probes of one direction are often below the lower bound."""
    sigma, kappa = rank_one(seed)[0].hessian_noise([torch.zeros(6, dtype=torch.float64)])
    assert kappa.value >= sigma.value**4 * (1 - 1e-9)


def test_noise_of_gradients_and_hessians():
    estimator = problem([[1.0, 0.5, 0.0]], [[0.0, 0.1, 0.2]])
    n, waving = 3, WOBBLE / K
    sigma, kappa = estimator.gradient_noise([at(*[math.pi / 2 / K] * 3)])
    near(sigma, math.sqrt(n * (JITTER**2 + waving**2)))
    ends = [n * (JITTER + waving) ** 2, n * (JITTER - waving) ** 2]
    near(kappa, np.mean(np.square(ends)))
    sigma, kappa = estimator.hessian_noise([at(0.0, 0.0, 0.0)])
    near(sigma, WOBBLE)  # the largest E‖Av‖² over unit vectors v
    near(kappa, n**2 * WOBBLE**4)  # Frobenius


def test_dissimilarity():
    estimator = problem([[1.0, 0.0], [-1.0, 0.0]], [[0.0, 0.0], [math.pi, 0.0]])
    # at w = 0 gradients are the offsets; curvature is ±L in the first coordinate
    near(estimator.gradient_dissimilarity([at(0.0, 0.0)]), 1.0)
    near(estimator.hessian_dissimilarity([at(0.0, 0.0)]), L)


def test_the_spectral_norm_of_random_matrices():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(200, 200, generator=generator, dtype=torch.float64)
    matrix = root + root.T
    right = float(torch.linalg.eigvalsh(matrix).abs().max())
    start = torch.randn(200, generator=generator, dtype=torch.float64)
    found = spectral_norm(lambda v: matrix @ v, start, 40)
    assert found == pytest.approx(right, rel=0.02) and found <= right * (1 + 1e-9)


@pytest.mark.parametrize(
    ("module", "smooth"),
    [
        (fcnn((5,), 3, (4,), "tanh"), True),
        (fcnn((5,), 3, (4,), "gelu"), True),
        (fcnn((5,), 3, (4,), "relu"), False),
        (nn.Sequential(nn.Linear(5, 4), nn.ELU(), nn.Linear(4, 3)), False),
        (nn.Sequential(nn.Linear(5, 4), nn.Hardtanh(), nn.Linear(4, 3)), False),
        (nn.Sequential(nn.Linear(5, 4), nn.Softshrink(), nn.Linear(4, 3)), False),
        (nn.Sequential(nn.Linear(5, 4), nn.CELU(), nn.Linear(4, 3)), False),
        (nn.Sequential(nn.Linear(5, 4), nn.SiLU(), nn.LayerNorm(4), nn.Linear(4, 3)), True),
        (nn.Sequential(nn.Linear(5, 4), nn.MaxPool1d(2), nn.Linear(2, 3)), False),
    ],
)
def test_kinks_are_detected(module, smooth):
    estimator = Estimator(Objective(module), federation())
    assert estimator.is_smooth(estimator.objective.initial()) is smooth


def test_measured_errors_of_the_three_updates():
    estimator = Estimator(Objective(mlp()), federation(samples=48), agents=4)
    w = estimator.objective.initial()
    settings = {"adapt_steps": 2, "adapt_lr": 0.5, "batch_size": 12}
    exact = GMeta(**settings)
    agent = estimator.agents[0]
    means = torch.stack([estimator._sample(w, exact, agent, i) for i in range(400)]).mean(dim=0)
    right = estimator.meta_gradients(w, exact, [estimator.parts[0].full])[0]
    assert (means - right).norm() < 0.1 * right.norm()
    first_order = GMeta(**settings, curvature=FirstOrder())
    hessian_free = GMeta(**settings, curvature=HessianFree())
    found = {n: estimator.measure(w, a) for n, a in
             {"exact": exact, "fo": first_order, "hf": hessian_free}.items()}  # fmt: skip
    assert found["hf"].error == pytest.approx(found["exact"].error, rel=1e-4)
    full = [part.full for part in estimator.parts]
    left_out = estimator.meta_gradients(w, exact, full) - torch.stack(
        [
            estimator.objective.grad(w_nu, part.full)
            for part, w_nu in zip(estimator.parts, adapted(estimator, w, 0.5, 2), strict=True)
        ]
    )
    rms = float(left_out.square().sum(dim=1).mean().sqrt())
    assert (
        found["fo"].bias == pytest.approx(rms, rel=0.35)
        and found["fo"].bias > 2 * found["exact"].bias
    )


def adapted(estimator, w, lr, steps):
    for part in estimator.parts:
        model = w
        for _ in range(steps):
            model = model - lr * estimator.objective.grad(model, part.full)
        yield model


def test_spread():
    assert spread(torch.tensor([[0.0, 0.0], [2.0, 4.0]])) == pytest.approx(math.sqrt(5))
