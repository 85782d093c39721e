"""Small modules, batches and federations that several tests use."""

import numpy as np
import torch
from torch import nn

from nufed import Batch, Federation, Objective
from nufed.data import as_samples, make_split


def mlp(dtype=torch.float64, width=7):
    """A smooth network on 5 inputs and 3 classes."""
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)


class Tied(nn.Module):
    """Encoder and decoder share one weight, inside a nested module."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"encode": nn.Linear(5, 5), "decode": nn.Linear(5, 5)})
        self.inner["decode"].weight = self.inner["encode"].weight
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.inner["decode"](torch.tanh(self.inner["encode"](x))))


def tied():
    return Tied().double()


def cnn():
    """A smooth convolutional network with GroupNorm on 5 inputs seen as 1×1×5 images."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)),
        nn.Conv2d(1, 4, (1, 3), padding=(0, 1)),
        nn.GroupNorm(2, 4),
        nn.Softplus(),
        nn.Flatten(),
        nn.Linear(20, 3),
    ).double()


def batches(count, size=6, dtype=torch.float64, seed=1):
    """Random batches of 5 inputs and 3 classes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch(
            torch.randn(size, 5, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def quadratic(dimensions=4):
    """f(w, (A, b)) = ½wᵀAw − bᵀw as an objective, and a maker of random batches (A, b)."""

    class Identity(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(dimensions, dtype=torch.float64))

        def forward(self, a):
            return 0.5 * self.w @ a @ self.w, self.w

    def loss(outputs, b):
        value, w = outputs
        return value - b @ w

    def batch(seed):
        generator = torch.Generator().manual_seed(seed)
        root = torch.randn(dimensions, dimensions, generator=generator, dtype=torch.float64)
        b = torch.randn(dimensions, generator=generator, dtype=torch.float64)
        return (root @ root.T, b)

    return Objective(Identity(), loss), batch


def federation(agents=6, samples=24, seed=0, inputs=5, classes=3, unseen=0, dtype=np.float32):
    """Agents with random data whose class depends on the inputs."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(agents * samples, inputs)).astype(dtype)
    y = (x @ rng.normal(size=(inputs, classes))).argmax(axis=1)
    rows = np.split(rng.permutation(len(x)), agents)
    split = make_split(rows, seed, validation=0.0, test=0.25, unseen_agents=unseen)
    return Federation(as_samples((torch.from_numpy(x), y)), split)


def relative_error(got, right):
    return float((got - right).norm() / right.norm())
