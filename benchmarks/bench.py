"""make bench: the cost of a round, all implementations interleaved in one run.

Measures nufed's engines, a PyTorch loop (plain.py) and a lower bound, the matrix products
(floor.py), on the same random data, and the memory of large models (memory.py). Prints ratios with
their range over repeats, and writes benchmarks/results/bench.json, a chart beside it, and the table
of methods in docs/performance.md. `--quick` is a smoke test at tiny sizes and keeps nothing unless
`--out` is given; `--job methods` runs one job and keeps the results of the others.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import memory
import torch
from chart import draw
from convolution_rows import convolutions_job
from floor import Floor
from jobs import (
    METHODS,
    QUICK,
    Ours,
    Plain,
    Sizes,
    cnn_contenders,
    lazy_data,
    paper_contenders,
    paper_data,
    paper_module,
)
from measure import interleaved, median, memory_bytes, ratio
from method_rows import methods_job, write_table
from one_core import one_core_job
from states import states_job

from nufed import Objective
from nufed.lab.config import load_config
from nufed.lab.config.problem import Problem, build_module
from nufed.lab.experiment.jobs import BASELINE_PART
from nufed.lab.experiment.session import Stop
from nufed.lab.experiment.setup import Setup
from nufed.lab.experiment.training import jobs_of
from nufed.lab.runs import RunDirectory
from nufed.simulation import DirectEngine, Workers, usable_cores

HERE = Path(__file__).parent
ROUNDS = 300  # over which one-time costs are amortised
TARGETS = {  # times faster than the PyTorch loop, amortised
    "FedAvg": 3, "FO nu=1": 4, "FO nu=3": 5, "HF nu=3": 8, "exact nu=3": 8, "evaluation": 3,
}  # fmt: skip
FLOOR_TARGETS = {"FO nu=3": 1.0, "HF nu=3": 0.5, "exact nu=3": 0.5}
LARGE_TARGETS = {"first_order": 12, "exact": 16}  # times the model


def paper_job(sizes, cores):
    """Rounds and evaluation of the paper's job, all contenders."""
    data = paper_data(sizes)
    cohort, everyone = range(sizes.cohort), range(sizes.agents)
    contenders = paper_contenders(data, sizes, cores)
    gram = contenders[f"gram, {cores} workers"]
    before = time.perf_counter()
    gram.round(everyone, 0, "first_order")  # forks, and computes every agent's Gram matrix
    first = time.perf_counter() - before
    again = interleaved({"all": lambda: gram.round(everyone, 0, "first_order")}, 2)
    start_up = max(0.0, first - median(again["all"]))
    widths, test = (sizes.inputs, 80, 60, 10), sizes.samples // 5
    contenders["floor"] = Floor(widths, sizes.batch, test, 4, cores)
    print(
        f"\nthe paper's job: {sizes.agents} agents x {sizes.samples - test} samples of "
        f"{sizes.inputs}, FCNN 80-60, {sizes.cohort} agents a round"
    )
    print(f"start-up of gram with {cores} workers, matrices included: {start_up:.2f} s")
    result = {"start_up": start_up, "methods": {}}
    jobs = {name: ("round", cohort, *method) for name, method in METHODS.items()}
    jobs["evaluation"] = ("evaluate", everyone)
    for job, (what, *arguments) in jobs.items():
        works = {n: partial(getattr(c, what), *arguments) for n, c in contenders.items()}
        times = interleaved(works, sizes.repeats)
        plains = [n for n in times if n.startswith("PyTorch")]
        best = min(plains, key=lambda n: median(times[n]))
        extra = start_up / ROUNDS
        fast = times[f"gram, {cores} workers"]
        result["methods"][job] = summary = {
            "times": times,
            "plain": best,
            "steady": ratio(times[best], fast),
            "amortised": ratio(times[best], fast, extra),
            "against floor": ratio(fast, times["floor"]),
            "workers": ratio(times["direct, 1 worker"], times[f"direct, {cores} workers"]),
        }
        table(job, times, times[best])
        print(f"    {job}, steady: {summary['steady']['median']:.2f} x the PyTorch loop's speed")
        verdict(f"{job}, amortised", summary["amortised"], TARGETS[job])
        if job in FLOOR_TARGETS:
            verdict(f"{job}, of the floor", summary["against floor"], FLOOR_TARGETS[job], True)
        verdict(f"{job}, direct, {cores} workers against 1", summary["workers"], 1.8)
    return result


def digits_job(sizes, cores):
    """The quickstart's training of all methods with one seed, evaluations included."""
    config = load_config("quickstart", ["seeds=[0]", *sizes.quickstart])
    problem = Problem.make(config)
    setup, data = Setup.make(problem), problem.federations[0]
    module = build_module(config, problem.samples, 0)
    loop = Plain(module, data, config.method.batch_size, config.method.local_steps)
    seen, agents = list(data.split.seen), list(data.split.agents)
    cohort = seen[: max(1, round(config.participation * len(seen)))]
    curvatures = {"FirstOrder": "first_order", "Exact": "exact", "HessianFree": "hf"}

    def by_hand():
        for algorithm in setup.algorithms.values():
            curvature = curvatures[type(algorithm.curvature).__name__]
            for k in range(config.rounds + 1):
                if k:
                    loop.round(cohort, algorithm.adapt_steps, curvature)
                if k % config.eval_every == 0 or k == config.rounds:
                    loop.evaluate(agents, config.steps_evaluated)

    def ours():
        with tempfile.TemporaryDirectory() as folder:
            directory = RunDirectory(Path(folder))
            jobs = [job for job in jobs_of(setup, directory) if job.part.method != BASELINE_PART]
            stop = Stop()
            workers = Workers(cores, lambda number, notify: jobs[number](notify, 1, stop))
            longest_first = sorted(range(len(jobs)), key=lambda number: -jobs[number].part.work)
            workers.map(longest_first, lambda number, last: str(jobs[number]))
            workers.close()

    works = {"PyTorch loop, 1 thread": by_hand, f"nufed, {cores} workers": ours}
    times = interleaved(works, sizes.few_repeats)
    slow, fast = times.values()
    print("\nquickstart: five methods on digits, one seed, evaluations included")
    table("all of it", times, slow)
    result = {"times": times, "ratio": ratio(slow, fast), "engines": setup.engine_names}
    verdict("digits quickstart", result["ratio"], 8)
    return result


def cnn_job(sizes, cores):
    contenders = cnn_contenders(sizes, cores)
    works = {n: partial(c.round, range(4), 1, "first_order") for n, c in contenders.items()}
    times = interleaved(works, min(sizes.repeats, 5))
    plains = [n for n in times if n.startswith("PyTorch")]
    best = min(plains, key=lambda n: median(times[n]))
    side = sizes.cnn_side
    print(f"\nGroupNorm CNN on {side} x {side} x 3, FO nu = 1, tau = 2, 4 agents a round")
    table("round", times, times[best])
    result = {"times": times, "ratio": ratio(times[best], times[f"direct, {cores} workers"])}
    verdict("CNN", result["ratio"], 1.5)
    return result


def scale_job(sizes):
    """Rounds with increasing N, each in a separate process: seconds and memory."""
    result = {}
    print(f"\nincreasing N, {sizes.cohort} agents a round, FO nu = 3, direct engine, 1 worker")
    for agents in sizes.scale:
        result[agents] = in_own_process(sizes, "scale", str(agents))
        one = result[agents]
        print(
            f"  N = {agents:>9,}: {one['seconds']:.3f} s a round, {one['mib']:.0f} MiB above base"
        )
    fewest = sizes.scale[0]
    slowest = max(r["seconds"] for r in result.values()) / result[fewest]["seconds"]
    most = max(r["mib"] for r in result.values())
    print(
        f"  slowest {slowest:.2f} x N = {fewest} (target 1.2), at most {most:.0f} MiB (target 1024)"
    )
    return result


def scale_of(sizes, agents):
    data, repeats = lazy_data(agents, sizes), sizes.repeats
    ours = Ours(DirectEngine(Objective(paper_module(sizes.inputs)), data, 0), sizes.batch)
    base = memory_bytes()
    # another cohort in every repeat, as in a run
    seconds, peak = [], 0
    for k in range(repeats + 1):
        ours.start = type(ours.start)(k, ours.start.server)
        start = time.perf_counter()
        ours.round(range(sizes.cohort), 3, "first_order")
        seconds.append(time.perf_counter() - start)
        peak = max(peak, memory_bytes() - base)
    return {"seconds": sorted(seconds[1:])[repeats // 2], "mib": peak / 2**20}


def memory_job(sizes, cores):
    """Memory above the data and the model, after rounds of exact nu = 3."""
    names = ["PyTorch loop, 1 thread", "direct, 1 worker", f"direct, {cores} workers",
             "gram, 1 worker", f"gram, {cores} workers"]  # fmt: skip
    jobs = {"paper": ("memory", names), "cnn": ("memory-cnn", names[:3])}
    result = {
        job: {n: in_own_process(sizes, kind, n)["mib"] for n in own[-sizes.measured :]}
        for job, (kind, own) in jobs.items()
    }
    for job, found in result.items():
        print(f"\npeak memory above the data, {job} job")
        for name, mib in found.items():
            print(f"  {name:24} {mib:6.0f} MiB")
    return result


def memory_of(sizes, kind, name, cores):
    if kind == "memory":
        contenders = paper_contenders(paper_data(sizes), sizes, cores)
        cohort, method = range(sizes.cohort), "exact"
    else:
        contenders, cohort, method = cnn_contenders(sizes, cores), range(4), "first_order"
    base, peak = memory_bytes(), 0
    for _ in range(3):
        contenders[name].round(cohort, 3, method)
        peak = max(peak, memory_bytes() - base)
    return {"mib": peak / 2**20}


def large_job(sizes):
    """Peak memory of whole runs of a large model, each in a separate process, in model sizes."""
    result = {}
    print("\nlarge model, 4 agents, 1 worker: peak memory of a whole run, times the model")
    runs = [(curvature, engine) for curvature in LARGE_TARGETS for engine in ("direct", "auto")]
    for curvature, engine in runs[-sizes.measured :]:
        found = memory.in_own_process(curvature, engine, sizes.large)
        result[f"{curvature}, {engine}"] = found
        target = LARGE_TARGETS[curvature]
        word = "reached" if found["ratio"] < target else "NOT reached"
        print(
            f"  {curvature}, engine {engine} ({found['engine']}): {found['ratio']:.1f} x "
            f"{found['model'] / 2**20:.0f} MiB, target < {target}: {word}"
        )
    return result


def table(job, times, unit):
    print(f"  {job}")
    for name, own in times.items():
        share, seconds, cpu = median(own) / median(unit), median(own), median(own, "cpu")
        print(f"    {name:24} {share:5.2f} x  {1e3 * seconds:7.1f} ms  {1e3 * cpu:7.1f} CPU-ms")


def verdict(what, found, target, at_most=False):
    reached = found["median"] <= target if at_most else found["median"] >= target
    sign, word = ("<=" if at_most else ">="), ("reached" if reached else "NOT reached")
    span = f"{found['from']:.2f} to {found['to']:.2f}"
    print(f"    {what}: {found['median']:.2f} ({span}), target {sign} {target}: {word}")


def only(sizes, kind, what, cores):
    """One measurement that needs a process of its own."""
    return scale_of(sizes, int(what)) if kind == "scale" else memory_of(sizes, kind, what, cores)


def in_own_process(sizes, *arguments):
    if sizes == QUICK and arguments[0] != "scale":  # starting one takes longer than measuring
        return only(sizes, *arguments, usable_cores())
    quick = ["--quick"] if sizes == QUICK else []
    command = [sys.executable, __file__, *quick, "--only", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one repeat")
    parser.add_argument("--out", type=Path, help="directory for results and the chart")
    parser.add_argument("--job", choices=JOBS, help="run this job alone and keep other results")
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes, cores = QUICK if options.quick else Sizes(), usable_cores()
    if options.only:
        print(json.dumps(only(sizes, *options.only, cores)))
        return
    with tempfile.TemporaryDirectory() as discarded:
        out = options.out or (Path(discarded) if options.quick else HERE / "results")
        out.mkdir(parents=True, exist_ok=True)
        kept = json.loads((out / "bench.json").read_text()) if options.job else {}
        results = kept | {
            "machine": {
                "cores": cores,
                "processor": platform.processor(),
                "torch": torch.__version__,
            },
            "turns": sizes.repeats,
            "rounds": ROUNDS,
        }
        for name in [options.job] if options.job else JOBS:
            results[name] = JOBS[name](sizes, cores)
        (out / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
        if out == HERE / "results":
            write_table(results["methods"], HERE.parent / "docs" / "performance.md")
        for path in draw(results, out):
            print(f"chart: {path}")
        print(f"results: {out / 'bench.json'}")


JOBS = {
    "paper": paper_job,
    "one_core": lambda sizes, cores: one_core_job(sizes),
    "methods": lambda sizes, cores: methods_job(sizes),
    "convolutions": lambda sizes, cores: convolutions_job(sizes),
    "digits": digits_job,
    "cnn": cnn_job,
    "memory": memory_job,
    "large": lambda sizes, cores: large_job(sizes),
    "scale": lambda sizes, cores: scale_job(sizes),
    "states": lambda sizes, cores: states_job(sizes),
}


if __name__ == "__main__":
    main()
