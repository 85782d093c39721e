"""A run directory: what a run leaves behind, and where.

::

    config.toml                     the configuration with every default written out
    run.json                        format version, what agents are scored by, engines, software
    splits/seed-0.safetensors       who holds which rows, with its SHA-256
    splits/seed-0.json              the same as counts of classes per agent, of the first 1000
    methods/NAME/seed-0/
        metrics.jsonl               one line per round
        agents.jsonl                one line per agent: scores of the final model
        failure.json                instead of the next two, if training had to stop, and why
        model.safetensors           the final state of the server; "model" is the meta-model
        model-round-000010.safetensors   the same, every save_every rounds
    baselines/NAME/seed-0/agents.jsonl   the null baselines, in the same form
    results.json                    the results table
    bounds.json                     what `nufed bounds` found, if it was asked
    timing.jsonl                    wall-clock values; everything above is the same in every run
    figures/, report.html           drawn from the files above
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from nufed.algorithm import State
from nufed.data import Samples, Split
from nufed.errors import RunError
from nufed.evaluate import AgentScores, Measure
from nufed.runs.config import Config

FORMAT = 1
LISTED = 1000  # agents of a split whose counts are written down


class RunDirectory:
    """Paths inside a run directory, and the files written there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, name: str, out: Path | None = None) -> RunDirectory:
        """A new, empty directory: ``out``, or the next free ``runs/NAME-001``; never an old run."""
        if out is not None:
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise RunError(
                    f"{out} exists and is not empty: a run never overwrites, give another"
                )
            return cls(_make(out, exist_ok=True))
        number = 1
        while True:
            path = Path("runs") / f"{name}-{number:03d}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:  # also made by another run a moment ago
                number += 1
            except OSError as error:
                raise _cannot_make(path, error) from error
            else:
                return cls(path)

    def part(self, kind: str, name: str, seed: int) -> Path:
        """The directory of one method or baseline and seed (``kind`` is methods or baselines)."""
        return _make(self.path / kind / name / f"seed-{seed}", exist_ok=True)

    def write_start(self, config: Config, measure: Measure, engines: Mapping[str, str]) -> None:
        (self.path / "config.toml").write_text(config.to_toml(), "utf-8")
        about = {
            "format": FORMAT,
            "measure": {"name": measure.name, "higher_is_better": measure.higher_is_better},
            "engines": dict(engines),
            "software": {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "threads": config.threads,
                **{package: version(package) for package in ("nufed", "torch", "numpy")},
            },
        }
        write_json(self.path / "run.json", about)

    def write_split(self, split: Split, samples: Samples, seed: int) -> None:
        folder = _make(self.path / "splits", exist_ok=True)
        split.save(folder / f"seed-{seed}.safetensors")
        about = {
            "sha256": split.fingerprint,
            "classes": samples.classes,
            "unseen": split.unseen,
            "number": len(split.agents),
            "agents": [
                {
                    "name": name,
                    "train": len(split.train[agent]),
                    "validation": len(split.validation[agent]),
                    "test": len(split.test[agent]),
                    "counts": class_counts(split, samples, agent),
                }
                for agent, name in enumerate(split.names[:LISTED])
            ],
        }
        write_json(folder / f"seed-{seed}.json", about)

    def write_scores(self, kind: str, name: str, seed: int, scores: Iterable[AgentScores]) -> None:
        with (self.part(kind, name, seed) / "agents.jsonl").open("w", encoding="utf-8") as file:
            for agent in scores:
                write_line(file, agent.record())

    def write_model(self, name: str, seed: int, server: State, round: int | None = None) -> None:
        """The server's state, after ``round`` rounds or at the end."""
        file = "model.safetensors" if round is None else f"model-round-{round:06d}.safetensors"
        tensors = {k: v.detach().cpu().contiguous() for k, v in server.items()}
        (self.part("methods", name, seed) / file).write_bytes(save(tensors))

    def write_failure(self, name: str, seed: int, reason: str) -> None:
        """Why a method could not be trained; what it had until then stays beside it."""
        write_json(self.part("methods", name, seed) / "failure.json", {"reason": reason})

    def write_timing(self, **values: Any) -> None:
        with (self.path / "timing.jsonl").open("a", encoding="utf-8") as file:
            write_line(file, values)


def class_counts(split: Split, samples: Samples, agent: int) -> list[int]:
    """How many samples of each class an agent holds; for regression just how many samples."""
    rows = [*split.train[agent], *split.validation[agent], *split.test[agent]]
    if not samples.classes:
        return [len(rows)]
    counts: list[int] = torch.bincount(
        samples.targets[rows], minlength=len(samples.classes)
    ).tolist()
    return counts


def write_json(path: Path, value: Any) -> None:
    """Indented JSON; values that are not finite become null."""
    path.write_text(json.dumps(finite(value), indent=1, allow_nan=False) + "\n", "utf-8")


def write_line(file: Any, record: Mapping[str, Any]) -> None:
    """One line of JSON; values that are not finite become null."""
    file.write(json.dumps(finite(record), allow_nan=False) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        for line in path.read_text("utf-8").splitlines():
            yield json.loads(line)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} can't be read: {error}") from error


def finite(value: Any) -> Any:
    """The value with null in the place of every number that is not finite, as JSON needs it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def _make(path: Path, exist_ok: bool = False) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        raise _cannot_make(path, error) from error
    return path


def _cannot_make(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} can't be created ({error.strerror}): choose a writable place with --out"
    )
