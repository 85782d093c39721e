"""What a soak must leave: the rounds of a simulation, and processes that do not grow."""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from nufed.data import Federation, as_samples, make_split
from nufed.lab.config.devices import torch_threads
from nufed.lab.runs.records import MetricsLine
from nufed.simulation import DirectEngine, replay

WINDOW = 60.0  # seconds of samples that are compared


def recorded_rounds(run):
    """The metrics of every round of a federation's run, without round 0, and their folder."""
    (folder,) = run.glob("methods/*/seed-*")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    return [MetricsLine.model_validate(json.loads(line)) for line in lines][1:], folder


def different_rounds(run, plan, parts):
    """The rounds whose server state differs in any bit from a simulation's with the recorded
    participants.

    Args:
        run: the run directory of a federation with ``save_every = 1``.
        plan: its plan.
        parts: inputs and targets of every site.
    """
    rounds, folder = recorded_rounds(run)
    sizes = [len(targets) for _, targets in parts]
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    split = make_split(
        rows,
        plan.seed,
        validation=plan.validation,
        test=plan.test,
        unseen_agents=plan.unseen_agents,
    )
    samples = as_samples(tuple(np.concatenate(part) for part in zip(*parts, strict=True)))
    engine = DirectEngine(plan.objective, Federation(samples, split), plan.seed)
    taken = [line.participants for line in rounds]
    with torch_threads(plan.threads):
        start = plan.objective.initial()
        _, *after = replay(plan.algorithm, engine, start, taken, plan.participation)
    return [
        progress.round
        for progress in after
        if not _same(
            progress.server, load_file(folder / f"model-round-{progress.round:06d}.safetensors")
        )
    ]


def _same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@dataclass
class Memory:
    """Resident memory of processes by their age; those that live shorter than ``warm_up`` plus two
    windows are not compared."""

    warm_up: float  # seconds
    _samples: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=dict)

    def sample(self, name, pid, age):
        """Add a sample of a process; ``name`` is its role."""
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:  # it has exited
            return
        self._samples.setdefault((name, pid), []).append((age, 4 * pages))

    def growth(self):
        """By role: the number of processes, the largest median of the last window in KiB, and the
        largest growth since the first window after the warm-up."""
        found = {}
        for (name, _), samples in self._samples.items():
            end = samples[-1][0]
            if end < self.warm_up + 2 * WINDOW:
                continue
            first = [kib for age, kib in samples if 0 <= age - self.warm_up < WINDOW]
            last = [kib for age, kib in samples if end - age < WINDOW]
            if first:
                before, after = statistics.median(first), statistics.median(last)
                found.setdefault(name, []).append((after, after / before - 1))
        return {
            name: {
                "processes": len(each),
                "kib": max(kib for kib, _ in each),
                "growth": max(growth for _, growth in each),
            }
            for name, each in sorted(found.items())
        }
