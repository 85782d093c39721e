"""The paper's job on one core, in CPU-seconds, through `nufed.run`.

Beside the PyTorch loop there is a lower bound: what every float32 implementation that keeps one
model per agent has to compute in the wide layer, namely one product with each distinct sample
before the first step, and one product that writes the agent's model; both as nufed computes them,
by oneDNN.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from jobs import METHODS, Plain, paper_data, paper_module
from measure import median, ratio

from nufed import Samples, run
from nufed.objective.fast.onednn import product

TARGETS = {"FedAvg": 3.5, "FO nu=3": 4.5, "HF nu=3": 6, "exact nu=3": 7}
CURVATURES = {"first_order": "first_order", "hf": "hessian_free", "exact": "exact"}


class WideProducts:
    """The products with the first layer that no engine avoids, and gathering the samples."""

    def __init__(self, data, width, batch_size, local_steps=4):
        self.inputs, self.train = data.samples.inputs, data.split.train
        self.batch_size, self.local_steps, self.rng = (
            batch_size,
            local_steps,
            np.random.default_rng(0),
        )
        most = data.split.most_rows
        self.weight, self.rows = torch.rand(width, self.inputs.shape[1]), torch.rand(most, width)
        self.table = torch.empty(most, self.inputs.shape[1])
        self.after = torch.empty_like(self.weight)

    def draw(self, rows, number):
        return [self.rng.choice(rows, self.batch_size, replace=False) for _ in range(number)]

    def round(self, cohort, nu, curvature):
        steps, products = self.local_steps, 0 if curvature == "first_order" else nu
        for agent in cohort:
            in_result = np.unique(self.draw(self.train[agent], steps * (1 + products)))
            tuned_on = np.ravel(self.draw(self.train[agent], steps * nu)).astype(int)
            used = np.concatenate([in_result, np.setdiff1d(tuned_on, in_result)])
            table = self.table[: len(used)]
            torch.index_select(self.inputs, 0, torch.from_numpy(used), out=table)
            product(table, self.weight)
            rows, samples = self.rows[: len(in_result)], table[: len(in_result)]
            torch.add(self.weight, product(rows.T, samples.T), out=self.after)


def rounds_of(contender, cohort, nu, curvature, number=10):
    """CPU-seconds of one round."""
    contender.round(cohort, nu, curvature)  # warms up
    start = time.process_time()
    for _ in range(number):
        contender.round(cohort, nu, curvature)
    return (time.process_time() - start) / number


def rounds_of_a_run(samples, sizes, nu, curvature):
    """CPU-seconds of one round inside `nufed.run`: the difference of a long and a short run.

    Both are long enough for every agent's matrix K, which is computed once.
    """

    def cost(rounds):
        config = {
            "rounds": rounds,
            "participation": sizes.cohort / sizes.agents,
            "eval_every": rounds,
            "workers": 1,
            "engine": "gram_onednn",
            "baselines": [],
            "data": {"partition": "given", "test": 0.2},
            "model": {"name": "fcnn"},
            "method": {
                "curvature": CURVATURES[curvature],
                "adapt_steps": nu,
                "batch_size": sizes.batch,
            },
        }
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            run(config, data=samples, out=Path(folder) / "run", figures=False)
            return time.process_time() - start

    few, many = sizes.run_rounds
    return (cost(many) - cost(few)) / (many - few)


def one_core_job(sizes):
    data = paper_data(sizes)
    plain = Plain(paper_module(sizes.inputs), data, sizes.batch)
    bound = WideProducts(data, 80, sizes.batch)
    owners = torch.empty(len(data.samples), dtype=torch.int64)
    for agent in data.split.agents:
        for part in (data.split.train, data.split.test):
            owners[torch.from_numpy(part[agent])] = agent
    names = tuple(map(str, range(10)))
    samples = Samples(data.samples.inputs, data.samples.targets, classes=names, owners=owners)
    cohort, result = range(sizes.cohort), {}
    print("\none core, CPU-milliseconds of a round: PyTorch loop, nufed.run, wide products alone")
    for name, (nu, curvature) in list(METHODS.items())[-sizes.measured :]:
        contenders = {
            "plain": lambda job: rounds_of(plain, cohort, *job),
            "nufed.run": lambda job: rounds_of_a_run(samples, sizes, *job),
            "wide products": lambda job: rounds_of(bound, cohort, *job),
        }
        times = {each: {"cpu": []} for each in contenders}
        for _ in range(sizes.few_repeats):  # in turns, so that load affects all alike
            for each, cost in contenders.items():
                times[each]["cpu"].append(cost((nu, curvature)))
        reached = ratio(times["plain"], times["nufed.run"], what="cpu")
        limit = ratio(times["plain"], times["wide products"], what="cpu")
        result[name] = {**times, "ratio": reached, "upper bound": limit}
        target = f", target {TARGETS[name]}" if name in TARGETS else ""
        each = " ".join(f"{1e3 * median(own, 'cpu'):7.1f}" for own in times.values())
        print(
            f"  {name:12} {each}: {reached['median']:.2f} x ({reached['from']:.2f} to "
            f"{reached['to']:.2f}){target}; no engine can exceed {limit['median']:.2f} x"
        )
    return result
