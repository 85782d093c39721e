"""Seconds per round, side by side in one run: nufed's direct engine and a plain loop.

The plain loop is what published Per-FedAvg code does: copy the module for every agent, step a copy
with torch.optim.SGD, call backward. It knows FedAvg and first-order updates only. Both work on the
same random data, on one thread, in turns; the ratio is of medians over turns.

    make bench
"""

import copy
import statistics
import time
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from nufed import Exact, Federation, FirstOrder, GMeta, HessianFree, Objective
from nufed.data import as_samples, make_split
from nufed.models import fcnn
from nufed.simulation import DirectEngine, Progress, run_round

AGENTS, SAMPLES, COHORT, TURNS = 20, 200, 0.25, 5
JOBS = {
    "digits, 64-32-10, D = 10": (64, (32,), 10),
    "paper, 3072-80-60-10, D = 40": (3072, (80, 60), 40),
}


def plain_round(module, data, cohort, adapt_steps, batch_size, local_steps):
    """A round of FedAvg or first-order meta-learning as it is usually written."""
    models = []
    for agent in cohort:
        model, rows = copy.deepcopy(module), data.split.train[agent]
        outer = torch.optim.SGD(model.parameters(), lr=0.001)
        for _ in range(local_steps):
            adapted = copy.deepcopy(model)
            inner = torch.optim.SGD(adapted.parameters(), lr=0.01)
            for step in range(adapt_steps + 1):
                picked = np.random.default_rng().choice(rows, batch_size, replace=False)
                inputs, targets = data.samples.take(picked)
                inner.zero_grad()
                F.cross_entropy(adapted(inputs), targets).backward()
                if step < adapt_steps:
                    inner.step()
            for own, other in zip(model.parameters(), adapted.parameters(), strict=True):
                own.grad = other.grad
            outer.step()
        models.append(model.state_dict())
    return {name: sum(m[name] for m in models) / len(models) for name in models[0]}


def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def make_jobs(width, hidden, batch_size):
    """What is timed, by name: plain loops first, then nufed, on the same data."""
    rng = np.random.default_rng(0)
    x = rng.random((AGENTS * SAMPLES, width), dtype=np.float32)
    rows = np.split(np.arange(len(x)), AGENTS)
    data = Federation(
        as_samples((x, rng.integers(0, 10, len(x)))), make_split(rows, 0, validation=0, test=0.2)
    )
    module = fcnn((width,), 10, hidden)
    objective = Objective(module)
    engine = DirectEngine(objective, data, seed=0)
    start = Progress(0, {"model": objective.initial()})
    cohort = range(round(AGENTS * COHORT))
    methods = {
        "FedAvg": (0, FirstOrder()),
        "FO nu=1": (1, FirstOrder()),
        "FO nu=3": (3, FirstOrder()),
        "HF nu=3": (3, HessianFree()),
        "exact nu=3": (3, Exact()),
    }
    jobs = {}
    for name, (nu, curvature) in methods.items():
        if isinstance(curvature, FirstOrder):
            arguments = (module, data, cohort, nu, batch_size, 4)
            jobs[f"plain loop, {name}"] = partial(plain_round, *arguments)
    for name, (nu, curvature) in methods.items():
        algorithm = GMeta(nu, curvature=curvature, batch_size=batch_size)
        jobs[f"nufed, {name}"] = partial(run_round, algorithm, engine, start, COHORT)
    return jobs


def main():
    torch.set_num_threads(1)
    for title, job in JOBS.items():
        jobs = make_jobs(*job)
        times = {name: [] for name in jobs}
        for _ in range(TURNS + 1):
            for name, work in jobs.items():
                times[name].append(seconds(work))
        times = {name: t[1:] for name, t in times.items()}  # the first turn warms up
        unit = statistics.median(times["plain loop, FedAvg"])
        print(f"\n{title}, tau = 4, {round(AGENTS * COHORT)} agents a round; unit: plain FedAvg")
        for name, t in times.items():
            median = statistics.median(t)
            spread = (max(t) - min(t)) / median
            print(
                f"  {name:22} {median / unit:6.2f} x  ({1e3 * median:6.1f} ms, spread {spread:.0%})"
            )


if __name__ == "__main__":
    main()
