"""Small modules, batches and federations that several tests use."""

import hashlib
import json
import os
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from nufed import Batch, Federation, Objective
from nufed.algorithms.protocol import AgentContext, AgentUpdate, Context
from nufed.data import as_samples, make_split
from nufed.lab.report.run_page import build_report
from nufed.server import Progress, Rules, close_round, open_round

FSYNC = os.fsync  # tests run without it


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
    """Agents of several sizes; small ones use all their samples as a batch."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(sum(sizes), inputs)).astype(np.float32)
    y = (x @ rng.normal(size=(inputs, classes))).argmax(axis=1)
    rows = np.split(rng.permutation(len(x)), np.cumsum(sizes)[:-1])
    split = make_split(rows, 0, validation=0.0, test=0.25, unseen_agents=unseen)
    return Federation(as_samples((torch.from_numpy(x), y)), split, small_agents="use_all")


def file_hashes(path):
    """The SHA-256 of all files of a run except those that contain wall-clock times."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file.name not in {"timing.jsonl", "report.html"}
        and "figures" not in file.parts
    }


def relative_error(got, right):
    return float((got - right).norm() / right.norm())


def context(round=1, agents=6, cohort=3):
    """The server's context of a round."""
    return Context(round, agents, cohort)


def agent_context(objective, batches, round=1):
    """An agent's context of a round."""
    return AgentContext.of(context(round), objective, batches, 24)


def states_of(engine, progress, agents=None):
    """Agents' states for an evaluation."""
    agents = engine.federation.split.agents if agents is None else agents
    return {agent: progress.states.get(agent) for agent in agents}


class Point(nn.Module):
    """The model is a point; its output is its distance to a sample."""

    def __init__(self, dimensions):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dimensions, dtype=torch.float64))

    def forward(self, inputs):
        return inputs, self.w


def quadratic_loss(outputs, targets):
    """½(w − b)ᵀA(w − b), with A and b in one input row: flattened A, then b."""
    rows, w = outputs
    n = len(w)
    a, b = rows[0, : n * n].reshape(n, n), rows[0, n * n :]
    return 0.5 * (w - b) @ a @ (w - b)


def quadratics(agents=5, dimensions=3):
    """Agents with different curvature and different minima, full batches."""
    generator = torch.Generator().manual_seed(4)
    rows, pairs = [], []
    for _ in range(agents):
        root = torch.randn(dimensions, dimensions, generator=generator, dtype=torch.float64)
        a = root @ root.T + 0.5 * torch.eye(dimensions, dtype=torch.float64)
        b = 3 * torch.randn(dimensions, generator=generator, dtype=torch.float64)
        pairs.append((a, b))
        rows += [torch.cat([a.flatten(), b])] * 4
    places = np.split(np.arange(4 * agents), agents)
    split = make_split(places, 0, validation=0.0, test=0.25)
    data = Federation(as_samples((torch.stack(rows), torch.zeros(4 * agents))), split)
    return data, pairs


def update(agent=0, vector=None, round=5, samples=10, **other):
    """An agent's update of three numbers, by default the agent's number."""
    vectors = {"model": torch.full((3,), float(agent)) if vector is None else vector, **other}
    return AgentUpdate(agent, round, samples, vectors)


class Killed(BaseException):
    """Simulates a kill of a run in a test."""


def same(left, right):
    """Whether two mappings from names to tensors are equal to the bit."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def json_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def report_without_figures(runs, out, *, figures=True):
    """:func:`nufed.lab.report.run_page.build_report` without SVG and PNG files."""
    return build_report(runs, out, figures=None if figures is None else False)


@contextmanager
def with_figures():
    """Reports are drawn as SVG and PNG files, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nufed.lab.report.run_page.build_report", build_report)
        yield


@contextmanager
def without_report():
    """Runs in this process write no report, which takes most of a small run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nufed.lab.report.run_page.build_report", lambda runs, out, **_: out)
        yield


def round_of(algorithm, server, updates, context, cohort=None, rules=Rules()):
    """The server's next state from these updates, and the rejected ones."""
    incoming = open_round(algorithm, Progress(0, server), context, cohort, rules)
    for each in updates:
        incoming.add(each)
    return close_round(algorithm, server, incoming, context, rules=rules)
