"""How far a run is: which methods and seeds are done, and the rounds of the others so far."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nufed.errors import RunError
from nufed.runs.finished_run import Run
from nufed.runs.read_run import load_run
from nufed.runs.records import MetricsLine, checked
from nufed.runs.results import Trained

# files of a run directory whose change is progress
WATCHED = (
    "run.json",
    "bounds.json",
    "methods/*/seed-*/metrics.jsonl",
    "methods/*/seed-*/done.json",
    "methods/*/seed-*/failure.json",
    "baselines/*/seed-*/done.json",
)


@dataclass(frozen=True)
class PartState:
    """One method and seed: "done", "failed", "training" or "waiting", and its rounds so far."""

    method: str
    seed: int
    state: str
    metrics: list[MetricsLine]


@dataclass(frozen=True)
class TrainingState:
    """A run and its parts; ``run`` has only those that are done."""

    run: Run
    parts: list[PartState]

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train, and a report can be made."""
        done = all(part.state in ("done", "failed") for part in self.parts)
        return done and bool(self.run.methods) and not self.missing_baselines()

    def missing_baselines(self) -> list[str]:
        """The null baselines that were begun and are not done."""
        begun = self.run.path / "baselines"
        names = sorted(path.name for path in begun.iterdir()) if begun.is_dir() else []
        return [name for name in names if name not in self.run.baselines]

    def with_rounds_so_far(self) -> Run:
        """The run with the rounds, but no final scores, of parts that are not done."""
        methods: dict[str, dict[int, Trained]] = {}
        for part in self.parts:
            if part.metrics:
                done = self.run.methods.get(part.method, {}).get(part.seed)
                trained = done or Trained(part.metrics, [])
                methods.setdefault(part.method, {})[part.seed] = trained
        return replace(self.run, methods=methods)


def training_state(path: Path, *, trust: bool = False) -> TrainingState:
    """Read a run that may still be training; takes no lock and writes nothing."""
    run = load_run(path, trust=trust, partial=True)
    return TrainingState(run, list(_parts(run)))


def _parts(run: Run) -> Iterator[PartState]:
    for method in run.config.algorithms():
        for seed in run.config.seeds:
            folder = run.path / "methods" / method / f"seed-{seed}"
            if seed in run.methods.get(method, {}):
                yield PartState(method, seed, "done", run.methods[method][seed].metrics)
                continue
            metrics = rounds_so_far(folder / "metrics.jsonl")
            failed = (folder / "failure.json").exists()
            state = "failed" if failed else "training" if metrics else "waiting"
            yield PartState(method, seed, state, metrics)


def rounds_so_far(path: Path) -> list[MetricsLine]:
    """The complete lines of a metrics file that may be being written, up to an invalid one."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")  # the last one has no end
    except OSError:
        return []
    found: list[MetricsLine] = []
    for number, line in enumerate(lines):
        try:
            found.append(checked(MetricsLine, line, path, number + 1))
        except RunError:
            break
    return found


def version_of(path: Path) -> str:
    """A text that changes when the run makes progress: sizes and times of its files."""
    found = []
    for pattern in WATCHED:
        for file in sorted(path.glob(pattern)):
            try:
                about = file.stat()
            except OSError:  # removed by a resume since
                continue
            found.append((str(file), about.st_size, about.st_mtime_ns))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]
