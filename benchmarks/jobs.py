"""The benchmarked jobs: data, models, and the implementations of a round on them."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from plain import Meta, Samples

from nufed import Exact, Federation, FirstOrder, GMeta, HessianFree, Objective
from nufed.data import DirichletReusing, as_samples, lazy_split, make_split
from nufed.evaluate import Measure
from nufed.models import cnn_groupnorm, fcnn
from nufed.simulation import DirectEngine, Progress, Training, WorkerEngine
from nufed.simulation.choose_engine import Engines

ACCURACY = Measure("accuracy")


@dataclass(frozen=True)
class Sizes:
    """The sizes of the jobs; by default those that docs/performance.md reports."""

    repeats: int = 9
    few_repeats: int = 3  # of long jobs
    method_repeats: int = 21  # of the rows of methods
    agents: int = 50
    samples: int = 1000  # of every agent
    inputs: int = 3072
    batch: int = 40
    cohort: int = 10
    cnn_samples: int = 200
    cnn_side: int = 32
    conv_cohort: int = 2  # agents a round of the rows of convolutional nets
    conv_repeats: int = 5
    quickstart: tuple[str, ...] = ()  # overrides
    pool: int = 20_000  # samples that a large number of agents share
    scale: tuple[int, ...] = (10**2, 10**3, 10**4, 10**5, 10**6)
    with_state: tuple[int, int] = (10**3, 10**5)  # agents that have a state
    state_cohort: int = 100
    state_rounds: int = 30
    state_evaluated: int = 10**4  # agents with a state that are evaluated, at most
    large: tuple[int, ...] = (7000, 3850)  # hidden layers of the large model: 48.5 million
    run_rounds: tuple[int, int] = (60, 160)  # of two runs, whose difference is the cost of rounds
    measured: int = 5  # maximum number of contenders whose memory is measured


QUICK = Sizes(
    repeats=1,
    few_repeats=1,
    method_repeats=1,
    agents=2,
    samples=20,
    inputs=12,
    batch=4,
    cohort=1,
    cnn_samples=10,
    cnn_side=12,
    conv_cohort=1,
    conv_repeats=1,
    quickstart=("rounds=1", "data.agents=4", "data.unseen_agents=1"),
    pool=200,
    scale=(10,),
    with_state=(4, 8),
    state_cohort=2,
    state_rounds=1,
    state_evaluated=6,
    large=(40, 30),
    run_rounds=(1, 2),
    measured=1,
)  # a smoke test of every job

METHODS = {
    "FedAvg": (0, "first_order"),
    "FO nu=1": (1, "first_order"),
    "FO nu=3": (3, "first_order"),
    "HF nu=3": (3, "hf"),
    "exact nu=3": (3, "exact"),
}
CURVATURES = {"first_order": FirstOrder(), "exact": Exact(), "hf": HessianFree()}


class Ours:
    """An engine of nufed as a contender: the whole round, with checks and aggregation."""

    def __init__(self, engine, batch_size, local_steps=4):
        self.engine, self.batch_size, self.local_steps = engine, batch_size, local_steps
        self.start = Progress(0, {"model": engine.objective.initial()})
        self.algorithm = cache(self.make_algorithm)  # the same object, which workers inherit once

    def make_algorithm(self, nu, curvature):
        return GMeta(
            nu,
            local_steps=self.local_steps,
            batch_size=self.batch_size,
            curvature=CURVATURES[curvature],
        )

    def round(self, cohort, nu, curvature):
        agents = len(self.engine.federation.split.agents)
        algorithm, participation = self.algorithm(nu, curvature), len(cohort) / agents
        Training(algorithm, self.engine, participation).round(self.start)

    def evaluate(self, agents, steps=3):
        algorithm = self.algorithm(steps, "first_order")
        states = {agent: {} for agent in agents}
        self.engine.evaluate(algorithm, self.start.server, states, steps=steps, measure=ACCURACY)


class Threads:
    """A contender that runs on a given number of torch threads."""

    def __init__(self, contender, threads):
        self.contender, self.threads = contender, threads

    def __getattr__(self, name):
        def call(*arguments):
            torch.set_num_threads(self.threads)
            try:
                getattr(self.contender, name)(*arguments)
            finally:
                torch.set_num_threads(1)

        return call


def image_data(agents, per_agent, shape):
    """Random images in random classes: run time does not depend on them."""
    rng = np.random.default_rng(0)
    inputs = rng.random((agents * per_agent, *shape), dtype=np.float32)
    rows = np.split(rng.permutation(len(inputs)), agents)
    split = make_split(rows, 0, validation=0, test=0.2)
    return Federation(as_samples((inputs, rng.integers(0, 10, len(inputs)))), split)


class Plain:
    """The PyTorch loop of gMeta as a contender."""

    def __init__(self, module, data, batch_size, local_steps=4):
        inputs, split = data.samples.inputs, data.split
        if inputs.dtype == torch.uint8:  # scaled once, before it starts
            inputs = inputs * data.samples.scale
        self.test = split.test
        samples = Samples(inputs, data.samples.targets, split.train, batch_size)
        self.loop = Meta(module, samples, GMeta(local_steps=local_steps))

    def round(self, cohort, nu, curvature):
        self.loop.nu, self.loop.curvature = nu, type(CURVATURES[curvature]).__name__
        self.loop.round(cohort)

    def evaluate(self, agents, steps=3):
        self.loop.evaluate({agent: self.test[agent] for agent in agents}, steps)


def paper_data(sizes):
    return image_data(sizes.agents, sizes.samples, (sizes.inputs,))


def paper_module(inputs):
    torch.manual_seed(0)
    return fcnn((inputs,), 10)


def paper_contenders(data, sizes, cores, local_steps=4):
    """Every implementation of the paper's job, by name."""
    module, batch = paper_module(sizes.inputs), sizes.batch
    objective = Objective(module)
    direct = DirectEngine(objective, data, 0)
    gram = Engines(objective, data, 0).get("gram_onednn")
    yardstick = Plain(module, data, batch, local_steps)
    return {
        "PyTorch loop, 1 thread": yardstick,
        f"PyTorch loop, {cores} threads": Threads(yardstick, cores),
        "direct, 1 worker": Ours(direct, batch, local_steps),
        f"direct, {cores} workers": Ours(WorkerEngine(direct, cores), batch, local_steps),
        "gram, 1 worker": Ours(gram, batch, local_steps),
        f"gram, {cores} workers": Ours(WorkerEngine(gram, cores), batch, local_steps),
    }


def cnn_contenders(sizes, cores):
    shape, batch = (3, sizes.cnn_side, sizes.cnn_side), sizes.batch
    data = image_data(agents=10, per_agent=sizes.cnn_samples, shape=shape)
    torch.manual_seed(0)
    module = cnn_groupnorm(shape, 10)
    direct = DirectEngine(Objective(module), data, 0)
    yardstick = Plain(module, data, batch, local_steps=2)
    return {
        "PyTorch loop, 1 thread": yardstick,
        f"PyTorch loop, {cores} threads": Threads(yardstick, cores),
        "direct, 1 worker": Ours(direct, batch, 2),
        f"direct, {cores} workers": Ours(WorkerEngine(direct, cores), batch, 2),
    }


def lazy_data(agents, sizes):
    """Agents whose samples are drawn from a pool: four fifths for training, the rest for test."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, sizes.pool)
    inputs = rng.random((len(labels), sizes.inputs), dtype=np.float32)
    test = sizes.samples // 5
    parts = (sizes.samples - test, 0, test)
    split = lazy_split(DirichletReusing(labels, agents, parts, 0.3, 0), ())
    return Federation(as_samples((inputs, labels)), split)
