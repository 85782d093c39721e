"""Measures several implementations of one job: seconds, CPU-seconds, memory."""

import os
import statistics
import time
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def process_tree(pid=None):
    """This process and all its children."""
    pid = pid or os.getpid()
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += process_tree(int(child))
    return found


def cpu_seconds():
    """CPU time of the process tree, including children that have ended (these in ticks)."""
    ticks, own = 0, os.getpid()
    for pid in process_tree():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # of children their own time too; of every process that of children waited for
        ticks += sum(map(int, fields[13 if pid == own else 11 : 15]))
    return time.process_time() + ticks / TICK


def memory_bytes():
    """Memory of the process tree, shared pages counted once."""
    total = 0
    for pid in process_tree():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


def interleaved(contenders, repeats, warm_up=True):
    """Seconds and CPU-seconds of every contender in every repeat.

    Each repeat runs all of them, so that load on the machine affects all alike. A single repeat is
    a smoke test, without warm-up.
    """
    if warm_up and repeats > 1:
        for work in contenders.values():
            work()
    times = {name: {"seconds": [], "cpu": []} for name in contenders}
    for _ in range(repeats):
        for name, work in contenders.items():
            cpu, start = cpu_seconds(), time.perf_counter()
            work()
            times[name]["seconds"].append(time.perf_counter() - start)
            times[name]["cpu"].append(cpu_seconds() - cpu)
    return times


def median(times, what="seconds"):
    return statistics.median(times[what])


def ratio(slow, fast, extra=0.0, what="seconds"):
    """The speed-up of ``fast`` over ``slow``: median and range of the ratios within repeats.

    ``extra`` seconds are added to every repeat of ``fast``: amortised one-time costs. ``what`` may
    also be ``"cpu"``.
    """
    each = [a / (b + extra) for a, b in zip(slow[what], fast[what], strict=True)]
    return {"median": statistics.median(each), "from": min(each), "to": max(each)}
