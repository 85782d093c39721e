"""make peers: the paper's job with nufed, a PyTorch loop, JAX, Flower with Ray, and pfl-research.

Every contestant has a process of its own; all run in turns on one core and are measured in
CPU-seconds of their process trees, and in seconds. Prints a table and writes
benchmarks/results/peers.json. Peers that are not installed are skipped. `--quick` is a smoke test
at tiny sizes that keeps nothing unless `--out` is given.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from contestant import CONTESTANTS
from problem import EVALUATION, METHODS, sizes_of, write

HERE = Path(__file__).parent
REPEATS = 5


class Contestant:
    """A process that does jobs on command."""

    def __init__(self, name, folder, options):
        command = [sys.executable, str(HERE / "contestant.py"), name, str(folder)]
        paths = os.pathsep.join([str(HERE), str(HERE.parent)])
        self.process = subprocess.Popen(
            [*command, *["--quick"] * options.quick],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        self.first, self.times, self.skipped, self.jobs = {}, {}, None, []

    def start(self):
        self.jobs = self.hear().get("jobs", [])

    def hear(self):
        line = self.process.stdout.readline()
        found = json.loads(line) if line else {"skipped": "it ended without a word"}
        self.skipped = found.get("skipped", self.skipped)
        return found

    def run(self, job, warm_up):
        if self.skipped or job not in self.jobs:
            return
        print(job, file=self.process.stdin, flush=True)
        found = self.hear()
        if warm_up:
            self.first[job] = found
        elif not self.skipped:
            own = self.times.setdefault(job, {"seconds": [], "cpu": []})
            own["seconds"].append(found["seconds"])
            own["cpu"].append(found["cpu"])

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def compare(options):
    names = options.only or list(CONTESTANTS)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), sizes_of(options.quick))
        found = {name: Contestant(name, folder, options) for name in names}
        for each in found.values():
            each.start()
        for job in (*METHODS, EVALUATION):
            for turn in range(1 + (1 if options.quick else options.repeats)):
                for each in found.values():
                    each.run(job, warm_up=turn == 0)
        for each in found.values():
            each.end()
    return found


def show(found):
    """Median CPU-milliseconds and milliseconds of every job, as a table in Markdown."""
    columns = (*METHODS, EVALUATION)
    print(f"| CPU-ms (ms) | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, each in found.items():
        if each.skipped:
            print(f"| {name} | skipped: {each.skipped} |")
            continue
        cells = [
            f"{1e3 * median(each, job, 'cpu'):.0f} ({1e3 * median(each, job, 'seconds'):.0f})"
            if job in each.times
            else "—"
            for job in columns
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def median(contestant, job, what):
    return statistics.median(contestant.times[job][what])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one repeat")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help="these contestants")
    parser.add_argument("--out", type=Path, help="file of results")
    parser.add_argument("--verbose", action="store_true", help="show what contestants print")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, also for children
    found = compare(options)
    show(found)
    out = options.out or (None if options.quick else HERE.parent / "results" / "peers.json")
    if out:
        kept = {
            name: {"skipped": c.skipped} if c.skipped else {"first": c.first, "times": c.times}
            for name, c in found.items()
        }
        out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
