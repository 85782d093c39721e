"""The cost of agents' states on disk: rounds of SCAFFOLD with a checkpoint each, by N.

    python benchmarks/states.py 1000 100 500

fills a run's part with a state of 10,350 numbers for each of 1000 agents, then runs a round of 100
agents for every line of input and prints its seconds, in total and for the checkpoint; at the end
of input the memory of the process, and what evaluating 500 agents adds to it. The job interleaves
few and many agents, so that load on the disk affects both.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from jobs import ACCURACY, Sizes, lazy_data, paper_module
from measure import memory_bytes

from nufed import Objective
from nufed.algorithms.scaffold import Scaffold
from nufed.lab.runs.part_files import PartFiles
from nufed.server import Progress, StatesOf, to_send
from nufed.simulation import DirectEngine, Training

TARGET = 1.3
SIZES = Sizes(inputs=60, pool=2000, samples=50)
FILLED = 1000  # agents whose states are written in one round before measuring


def states_job(sizes):
    """Seconds a round and memory with few and with many agents, and their ratios."""
    few, many = sizes.with_state
    with ExitStack() as stack:
        processes = {n: stack.enter_context(_process(n, sizes)) for n in (few, many)}
        for process in processes.values():
            process.stdout.readline()  # filled
        rounds = {n: [] for n in processes}
        for _ in range(sizes.state_rounds + 1):
            for agents, process in processes.items():
                process.stdin.write("round\n")
                process.stdin.flush()
                rounds[agents].append(json.loads(process.stdout.readline()))
        found = {}
        for agents, process in processes.items():
            rest, _ = process.communicate()
            measured = rounds[agents][1:]  # the first warms up
            found[agents] = {
                "seconds": statistics.median(one["seconds"] for one in measured),
                "checkpoint": statistics.median(one["checkpoint"] for one in measured),
                **json.loads(rest),
            }
    ratios = {what: found[many][what] / found[few][what] for what in ("seconds", "mib")}
    print(f"\nagents' states on disk, {sizes.state_cohort} agents a round, a checkpoint each round")
    for agents, one in found.items():
        print(
            f"  N = {agents:>7,}: {one['seconds']:.3f} s a round ({one['checkpoint']:.3f} s of it "
            f"the checkpoint), {one['mib']:.0f} MiB, {one['above']:.0f} MiB of it above base"
        )
        print(
            f"    evaluation of {one['evaluated']:,} agents: {one['evaluation_mib']:.0f} MiB more, "
            f"their states {one['states_mib']:.0f} MiB"
        )
    for what, ratio in ratios.items():
        word = "reached" if ratio <= TARGET else "NOT reached"
        print(f"    {what}: {ratio:.2f} x, target <= {TARGET}: {word}")
    return {"agents": found, "ratios": ratios}


def _process(agents, sizes):
    numbers = (agents, sizes.state_cohort, min(agents, sizes.state_evaluated))
    command = [sys.executable, __file__, *map(str, numbers)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve(agents, cohort, evaluated):
    """Run a round for every line of input, then evaluate."""
    engine = DirectEngine(Objective(paper_module(SIZES.inputs)), lazy_data(agents, SIZES), 0)
    algorithm = Scaffold(meta_lr=0.01, local_steps=1, batch_size=20)
    w, base = engine.objective.initial(), memory_bytes()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        files = PartFiles(Path(folder), {"configuration": "benchmark"})
        files.begin(rounds=10**6, eval_every=1)
        filled = _fill(files, agents, w)
        progress = Progress(filled, algorithm.server_init(engine.objective, w), files.states)
        print("filled", flush=True)
        peak = 0
        for _ in sys.stdin:
            start = time.perf_counter()
            progress = Training(algorithm, engine, cohort / agents).round(progress)
            files.add({"round": progress.round})
            trained = time.perf_counter()
            files.checkpoint(progress.round, progress.server)
            end = time.perf_counter()
            peak = max(peak, memory_bytes())
            print(json.dumps({"seconds": end - start, "checkpoint": end - trained}), flush=True)
        before, states = memory_bytes(), Sampled(range(evaluated), files.states)
        received = to_send(algorithm, progress.server)
        engine.evaluate(algorithm, received, states, steps=1, measure=ACCURACY)
        files.close()
    found = {
        "mib": peak,
        "above": peak - base,
        "evaluation_mib": states.peak - before,
        "states_mib": evaluated * w.nbytes,
    }
    print(json.dumps({"evaluated": evaluated, **{k: v / 2**20 for k, v in found.items()}}))


class Sampled(StatesOf):
    """Measures memory at every hundredth look-up and at the last one."""

    looked, peak = 0, 0

    def __getitem__(self, agent):
        self.looked += 1
        if self.looked % 100 == 0 or self.looked == len(self):
            self.peak = max(self.peak, memory_bytes())
        return super().__getitem__(agent)


def _fill(files, agents, w):
    """Give every agent a state, and sync once at the end; returns the number of rounds."""
    sync, os.fsync = os.fsync, lambda descriptor: None
    round = 0
    for first in range(0, agents, FILLED):
        round += 1
        own = range(first, min(agents, first + FILLED))
        files.states.put(round, {agent: {"control": w * 1e-6 * agent} for agent in own})
    files.checkpoint(round, {"model": w})
    os.fsync = sync
    os.sync()
    return round


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(*map(int, sys.argv[1:]))
