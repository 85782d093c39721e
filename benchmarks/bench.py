"""make bench: what a round costs, side by side in one run.

Measures nufed's engines, a plain loop (plain.py) and the matrix-product floor of the direct method
(floor.py) on the same random data. Prints ratios with their range over turns, and writes
benchmarks/results/bench.json and charts beside it. `--quick` takes fewer turns.
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

import torch
from chart import draw
from floor import Floor
from jobs import (
    METHODS,
    Ours,
    cnn_contenders,
    image_data,
    lazy_data,
    paper_contenders,
    paper_module,
    plain,
)
from measure import in_turns, median, memory_bytes, ratio

from nufed import Objective
from nufed.experiment.parts import BASELINES, parts_of, run_part
from nufed.experiment.setup import Setup
from nufed.runs import RunDirectory, load_config
from nufed.runs.build import build_federation, build_module, build_samples
from nufed.simulation import DirectEngine, Workers, usable_cores

RESULTS = Path(__file__).parent / "results"
ROUNDS = 300  # over which what is done once is spread
COHORT, EVERYONE = range(10), range(50)
TARGETS = {  # times faster than the plain loop, amortised
    "FedAvg": 3, "FO nu=1": 4, "FO nu=3": 5, "HF nu=3": 8, "exact nu=3": 8, "evaluation": 3,
}  # fmt: skip
FLOOR_TARGETS = {"FO nu=3": 1.0, "HF nu=3": 0.5, "exact nu=3": 0.5}


def paper_job(turns, cores):
    """Rounds and evaluation of the paper's job, all contenders."""
    data = image_data()
    contenders = paper_contenders(data, cores)
    gram = contenders[f"gram, {cores} workers"]
    before = time.perf_counter()
    gram.round(EVERYONE, 0, "first_order")  # forks, and computes every agent's matrix
    first = time.perf_counter() - before
    again = in_turns({"all": lambda: gram.round(EVERYONE, 0, "first_order")}, 2)
    start_up = max(0.0, first - median(again["all"]))
    contenders["floor"] = Floor((3072, 80, 60, 10), 40, 200, 4, cores)
    print("\nthe paper's job: 50 agents x 800 samples of 3072, FCNN 80-60, 10 agents a round")
    print(f"start-up of gram with {cores} workers, matrices included: {start_up:.2f} s")
    result = {"start_up": start_up, "methods": {}}
    jobs = {name: ("round", COHORT, *method) for name, method in METHODS.items()}
    jobs["evaluation"] = ("evaluate", EVERYONE)
    for job, (what, *arguments) in jobs.items():
        works = {n: partial(getattr(c, what), *arguments) for n, c in contenders.items()}
        times = in_turns(works, turns)
        plains = [n for n in times if n.startswith("plain")]
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
        print(f"    {job}, steady: {summary['steady']['median']:.2f} x the plain loop's speed")
        verdict(f"{job}, amortised", summary["amortised"], TARGETS[job])
        if job in FLOOR_TARGETS:
            verdict(f"{job}, of the floor", summary["against floor"], FLOOR_TARGETS[job], True)
        verdict(f"{job}, direct, {cores} workers against 1", summary["workers"], 1.8)
    return result


def digits_job(turns, cores):
    """The quickstart's training of all methods with one seed, evaluations included."""
    config = load_config("quickstart", ["seeds=[0]"])
    setup = Setup.make(config, model=None, data=None, loss=None, metric=None)
    samples = build_samples(config.data)
    data = build_federation(config, samples, 0)
    module = build_module(config, samples, 0)
    loop = plain(module, data, config.method.batch_size, config.method.local_steps)
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
            parts = [part for part in parts_of(setup) if part.method != BASELINES]
            workers = Workers(cores, lambda p, note: run_part(setup, p, directory, note, 1))
            workers.ask(sorted(parts, key=lambda p: -p.work), lambda part, note: str(part))
            workers.close()

    times = in_turns({"plain loop, 1 thread": by_hand, f"nufed, {cores} workers": ours}, turns)
    slow, fast = times.values()
    print("\nquickstart: five methods on digits, one seed, evaluations included")
    table("all of it", times, slow)
    result = {"times": times, "ratio": ratio(slow, fast), "engines": setup.engine_names}
    verdict("digits quickstart", result["ratio"], 8)
    return result


def cnn_job(turns, cores):
    contenders = cnn_contenders(cores)
    works = {n: partial(c.round, range(4), 1, "first_order") for n, c in contenders.items()}
    times = in_turns(works, turns)
    plains = [n for n in times if n.startswith("plain")]
    best = min(plains, key=lambda n: median(times[n]))
    print("\nGroupNorm CNN on 32 x 32 x 3, FO nu = 1, tau = 2, 4 agents a round")
    table("round", times, times[best])
    result = {"times": times, "ratio": ratio(times[best], times[f"direct, {cores} workers"])}
    verdict("CNN", result["ratio"], 1.5)
    return result


def scale_job(turns):
    """Rounds with more and more agents, each in a process of its own: seconds and memory."""
    result = {}
    print("\nmore agents, 10 of them a round, FO nu = 3, direct engine, 1 worker")
    for agents in (10**2, 10**3, 10**4, 10**5, 10**6):
        result[agents] = in_own_process("scale", str(agents), str(turns))
        one = result[agents]
        print(
            f"  N = {agents:>9,}: {one['seconds']:.3f} s a round, {one['mib']:.0f} MiB above base"
        )
    slowest = max(r["seconds"] for r in result.values()) / result[10**2]["seconds"]
    most = max(r["mib"] for r in result.values())
    print(f"  slowest {slowest:.2f} x N = 100 (target 1.2), at most {most:.0f} MiB (target 1024)")
    return result


def scale_of(agents, turns):
    data = lazy_data(agents)
    ours = Ours(DirectEngine(Objective(paper_module()), data, 0), 40)
    base = memory_bytes()
    # other agents in every turn, as in a run
    seconds, peak = [], 0
    for k in range(turns + 1):
        ours.start = type(ours.start)(k, ours.start.server)
        start = time.perf_counter()
        ours.round(COHORT, 3, "first_order")
        seconds.append(time.perf_counter() - start)
        peak = max(peak, memory_bytes() - base)
    return {"seconds": sorted(seconds[1:])[turns // 2], "mib": peak / 2**20}


def memory_job(cores):
    """Memory above the data and the model, after rounds of exact nu = 3."""
    names = ["plain loop, 1 thread", "direct, 1 worker", f"direct, {cores} workers",
             "gram, 1 worker", f"gram, {cores} workers"]  # fmt: skip
    result = {"paper": {n: in_own_process("memory", n)["mib"] for n in names}}
    result["cnn"] = {n: in_own_process("memory-cnn", n)["mib"] for n in names[:3]}
    for job, found in result.items():
        print(f"\npeak memory above the data, {job} job")
        for name, mib in found.items():
            print(f"  {name:24} {mib:6.0f} MiB")
    return result


def memory_of(kind, name, cores):
    contenders = (
        paper_contenders(image_data(), cores) if kind == "memory" else cnn_contenders(cores)
    )
    base, peak, method = memory_bytes(), 0, ("exact" if kind == "memory" else "first_order")
    for _ in range(3):
        contenders[name].round(COHORT if kind == "memory" else range(4), 3, method)
        peak = max(peak, memory_bytes() - base)
    return {"mib": peak / 2**20}


def sweeps(turns, cores):
    """Seconds per round against nu, tau, cohort and workers."""
    data, result = image_data(), {}
    names = ["plain loop, 1 thread", f"direct, {cores} workers", f"gram, {cores} workers"]

    def measured(contenders, *arguments):
        works = {n: partial(c.round, *arguments) for n, c in contenders.items()}
        return {n: median(t) for n, t in in_turns(works, turns).items()}

    def some(local_steps=4):
        every = paper_contenders(data, cores, local_steps)
        return {name: every[name] for name in names}

    usual = some()
    result["nu"] = {nu: measured(usual, COHORT, nu, "first_order") for nu in (0, 1, 2, 3, 5, 8)}
    result["cohort"] = {c: measured(usual, range(c), 3, "first_order") for c in (2, 5, 10, 20, 50)}
    result["tau"] = {t: measured(some(t), COHORT, 3, "first_order") for t in (1, 2, 4, 8)}
    result["workers"] = {}
    for count in (1, 2, 3, 4):
        every = paper_contenders(data, count)
        contenders = {
            kind: every[f"{kind}, {count} workers" if count > 1 else f"{kind}, 1 worker"]
            for kind in ("direct", "gram")
        }
        result["workers"][count] = measured(contenders, COHORT, 3, "first_order")
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


def in_own_process(*arguments):
    done = subprocess.run(
        [sys.executable, __file__, "--only", *arguments], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cores, turns = usable_cores(), 3 if options.quick else 9
    if options.only:
        kind, *rest = options.only
        found = scale_of(*map(int, rest)) if kind == "scale" else memory_of(kind, rest[0], cores)
        print(json.dumps(found))
        return
    results = {
        "machine": {"cores": cores, "processor": platform.processor(), "torch": torch.__version__},
        "turns": turns,
        "rounds": ROUNDS,
        "paper": paper_job(turns, cores),
        "digits": digits_job(3, cores),
        "cnn": cnn_job(min(turns, 5), cores),
        "memory": memory_job(cores),
        "scale": scale_job(turns),
        "sweeps": sweeps(3, cores),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    for path in draw(results, RESULTS):
        print(f"chart: {path}")
    print(f"results: {RESULTS / 'bench.json'}")


if __name__ == "__main__":
    main()
