"""The jobs that are measured: data, models, and every way of doing a round on them."""

from functools import cache

import numpy as np
import torch
from plain import Plain

from nufed import Exact, Federation, FirstOrder, GMeta, HessianFree, Objective
from nufed.data import DirichletReusing, as_samples, lazy_split, make_split
from nufed.evaluate import Measure
from nufed.gram import first_layer
from nufed.models import cnn, fcnn
from nufed.simulation import DirectEngine, GramEngine, Progress, WorkerEngine, run_round

ACCURACY = Measure("accuracy")
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
        self.algorithm = cache(self.make_algorithm)  # the same object, so that workers know it

    def make_algorithm(self, nu, curvature):
        return GMeta(
            nu,
            local_steps=self.local_steps,
            batch_size=self.batch_size,
            curvature=CURVATURES[curvature],
        )

    def round(self, cohort, nu, curvature):
        agents = len(self.engine.federation.split.agents)
        run_round(self.algorithm(nu, curvature), self.engine, self.start, len(cohort) / agents)

    def evaluate(self, agents, steps=3):
        algorithm = self.algorithm(steps, "first_order")
        states = {agent: {} for agent in agents}
        self.engine.evaluate(algorithm, self.start.server, states, steps=steps, measure=ACCURACY)


class Threads:
    """A contender that runs on so many torch threads."""

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


def image_data(agents=50, per_agent=1000, shape=(3072,)):
    """Random images in random classes: what is measured does not depend on them."""
    rng = np.random.default_rng(0)
    inputs = rng.random((agents * per_agent, *shape), dtype=np.float32)
    rows = np.split(rng.permutation(len(inputs)), agents)
    split = make_split(rows, 0, validation=0, test=0.2)
    return Federation(as_samples((inputs, rng.integers(0, 10, len(inputs)))), split)


def plain(module, data, batch_size, local_steps=4):
    inputs, targets = data.samples.inputs, data.samples.targets
    if inputs.dtype == torch.uint8:  # scaled once, before it starts
        inputs = inputs * data.samples.scale
    train, test = data.split.train, data.split.test
    return Plain(module, inputs, targets, train, test, batch_size, local_steps)


def paper_module():
    torch.manual_seed(0)
    return fcnn((3072,), 10)


def paper_contenders(data, cores, local_steps=4):
    """Every way of doing the paper's job, by name."""
    module = paper_module()
    objective = Objective(module)
    direct = DirectEngine(objective, data, 0)
    gram = GramEngine(objective, data, 0, first_layer(objective, (3072,)))
    yardstick = plain(module, data, 40, local_steps)
    return {
        "plain loop, 1 thread": yardstick,
        f"plain loop, {cores} threads": Threads(yardstick, cores),
        "direct, 1 worker": Ours(direct, 40, local_steps),
        f"direct, {cores} workers": Ours(WorkerEngine(direct, cores), 40, local_steps),
        "gram, 1 worker": Ours(gram, 40, local_steps),
        f"gram, {cores} workers": Ours(WorkerEngine(gram, cores), 40, local_steps),
    }


def cnn_contenders(cores):
    data = image_data(agents=10, per_agent=200, shape=(3, 32, 32))
    torch.manual_seed(0)
    module = cnn((3, 32, 32), 10)
    direct = DirectEngine(Objective(module), data, 0)
    yardstick = plain(module, data, 40, local_steps=2)
    return {
        "plain loop, 1 thread": yardstick,
        f"plain loop, {cores} threads": Threads(yardstick, cores),
        "direct, 1 worker": Ours(direct, 40, 2),
        f"direct, {cores} workers": Ours(WorkerEngine(direct, cores), 40, 2),
    }


def lazy_data(agents):
    """So many agents with 800 + 200 samples each, drawn from 20,000."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 20_000)
    inputs = rng.random((len(labels), 3072), dtype=np.float32)
    split = lazy_split(DirichletReusing(labels, agents, (800, 0, 200), 0.3, 0), ())
    return Federation(as_samples((inputs, labels)), split)
