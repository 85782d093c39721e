"""Small modules, batches and federations that several tests use."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from nufed import Batch, Federation, Objective
from nufed.aggregate import average
from nufed.algorithm import ClientResult, Cost
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


def federation(
    agents=6, samples=24, seed=0, inputs=5, classes=3, unseen=0, dtype=np.float32, validation=0.0
):
    """Agents with random data whose class depends on the inputs."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(agents * samples, inputs)).astype(dtype)
    y = (x @ rng.normal(size=(inputs, classes))).argmax(axis=1)
    rows = np.split(rng.permutation(len(x)), agents)
    split = make_split(rows, seed, validation=validation, test=0.25, unseen_agents=unseen)
    return Federation(as_samples((torch.from_numpy(x), y)), split)


def uneven_federation(sizes=(12, 16, 40, 24, 12, 40), inputs=5, classes=3, unseen=1):
    """Agents of several sizes, the small ones with all they have as their batch."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(sum(sizes), inputs)).astype(np.float32)
    y = (x @ rng.normal(size=(inputs, classes))).argmax(axis=1)
    rows = np.split(rng.permutation(len(x)), np.cumsum(sizes)[:-1])
    split = make_split(rows, 0, validation=0.0, test=0.25, unseen_agents=unseen)
    return Federation(as_samples((torch.from_numpy(x), y)), split, small_agents="use_all")


def file_hashes(path):
    """The SHA-256 of all files that a run leaves, but for wall-clock values and what shows them."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file.name not in {"timing.jsonl", "report.html"}
        and "figures" not in file.parts
    }


def relative_error(got, right):
    return float((got - right).norm() / right.norm())


@dataclass(frozen=True)
class Scaffold:
    """SCAFFOLD (its second option for control variates), for tests only."""

    lr: float = 0.1
    local_steps: int = 2
    batch_size: int = 6

    receives = ("model", "control")
    sends = ("model", "control")

    def server_init(self, objective, w):
        return {"model": w, "control": torch.zeros_like(w)}

    def client_init(self, w):
        return {"control": torch.zeros_like(w)}

    def client_update(self, objective, received, state, batches):
        w = received["model"]
        for t in range(self.local_steps):
            (batch,) = batches.draw("outer", self.batch_size, step=t)
            w = w - self.lr * (objective.grad(w, batch) - state["control"] + received["control"])
        drift = (received["model"] - w) / (self.local_steps * self.lr)
        control = state["control"] - received["control"] + drift
        sent = {"model": w, "control": control - state["control"]}
        return ClientResult(sent, {"control": control}, Cost(self.local_steps))

    def server_update(self, server, updates):
        change = average(updates, "control", "uniform")
        return {
            "model": average(updates, "model", "uniform"),
            "control": server["control"] + 0.5 * change,
        }

    def personalize(
        self, objective, server, state, batches, steps, scale=1.0
    ) -> Iterator[torch.Tensor]:
        w, lr = server["model"], scale * self.lr
        yield w
        for batch in batches.draw("adapt", self.batch_size, steps):
            w = w - lr * (objective.grad(w, batch) - state["control"] + server["control"])
            yield w
