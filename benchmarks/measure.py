"""Measuring several ways of doing one job side by side: seconds, CPU-seconds, memory."""

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
    """CPU time of the process tree, children that have ended included."""
    total = 0
    for pid in process_tree():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15]))  # own time, and that of children waited for
    return total / TICK


def memory_bytes():
    """Memory of the process tree, shared pages counted once."""
    total = 0
    for pid in process_tree():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


def in_turns(contenders, turns, warm_up=True):
    """Seconds and CPU-seconds of every contender in every turn.

    All are run one after another in every turn, so that a busy moment of the machine hits all.
    """
    if warm_up:
        for work in contenders.values():
            work()
    times = {name: {"seconds": [], "cpu": []} for name in contenders}
    for _ in range(turns):
        for name, work in contenders.items():
            cpu, start = cpu_seconds(), time.perf_counter()
            work()
            times[name]["seconds"].append(time.perf_counter() - start)
            times[name]["cpu"].append(cpu_seconds() - cpu)
    return times


def median(times, what="seconds"):
    return statistics.median(times[what])


def ratio(slow, fast, extra=0.0):
    """How many times faster ``fast`` is: median and range over turns, both taken turn by turn.

    ``extra`` seconds are added to every turn of ``fast``: its share of what is done once.
    """
    each = [a / (b + extra) for a, b in zip(slow["seconds"], fast["seconds"], strict=True)]
    return {"median": statistics.median(each), "from": min(each), "to": max(each)}
