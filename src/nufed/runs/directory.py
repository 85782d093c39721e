"""A run directory: what a run leaves behind, and where. Only its owner may enter it (mode 0700).

::

    config.toml                     the configuration with every default written out
    run.json                        sealed: the same configuration, format version, what agents are
                                    scored by, engines, software; written last: without it no run
                                    was begun
    splits/seed-0.safetensors       who holds which rows, with its SHA-256
    splits/seed-0.json              the same as counts of classes per agent, of the first 1000
    methods/NAME/seed-0/
        metrics.jsonl               one line per round
        checkpoint-000020.json, .safetensors   where to go on from; the last two are kept
        agents.jsonl                one line per agent: scores of the final model
        agents-chosen.jsonl         the same with the step sizes of fine-tuning that were chosen
        step-sizes.json             what was tried and chosen, if there are validation samples
        warnings.jsonl              what is wrong with the numbers behind it, if anything
        failure.json                instead of the others, if training had to stop, and why
        model.safetensors           the final state of the server; "model" is the meta-model
        done.json                   that it is done, with the SHA-256 of the files above
        model-round-000010.safetensors   the same, every save_every rounds
    baselines/NAME/seed-0/agents.jsonl   the null baselines, in the same form
    bundles/NAME.nufed              the meta-model of each method, first seed, to be adapted
    results.json                    the results table
    privacy.json                    of a federation with noisy updates: what epsilon was spent
    bounds.json                     what `nufed bounds` found, if it was asked
    timing.jsonl                    wall-clock values; everything above is the same in every run
    federation.json, log.txt        of a federation: how its sites know the run, and what happened
    figures/, report.html           drawn from the files above
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from nufed.algorithm import State
from nufed.data import Samples, Split
from nufed.errors import RunError
from nufed.evaluate import AgentScores
from nufed.runs.durable import cannot_write, is_full, make_private, signed, write_durably
from nufed.runs.files import check_entries, finite, read_record
from nufed.runs.records import LISTED, SplitRecord, TimingLine, checked
from nufed.runs.tensors import tensor_pieces

PRIVACY = "privacy.json"
BOUNDS = "bounds.json"


class RunDirectory:
    """Paths inside a run directory, and the files written there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, name: str, out: Path | None = None) -> RunDirectory:
        """A new, empty directory: ``out``, or the next free ``runs/NAME-001``; never an old run."""
        if out is not None:
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                how = f"; `nufed run --resume {out}` goes on with the run that is there"
                raise RunError(
                    f"{out} exists and is not empty: a run never overwrites, give another"
                    + (how if (out / "run.json").exists() else "")
                )
            return cls(_make(out))
        number = 1
        while True:
            path = Path("runs") / f"{name}-{number:03d}"
            try:
                make_private(path, exist_ok=False)
            except FileExistsError:  # also made by another run a moment ago
                number += 1
            except OSError as error:
                raise _cannot_make(path, error) from error
            else:
                return cls(path)

    def part(self, kind: str, name: str, seed: int) -> Path:
        """The directory of one method or baseline and seed (``kind`` is methods or baselines)."""
        return _make(self.path / kind / name / f"seed-{seed}")

    def bundles(self) -> Path:
        """The directory of the meta-models that can be adapted."""
        return _make(self.path / "bundles")

    def existing(self) -> Path:
        """The path, if a run was begun there and all of it lies there."""
        if not (self.path / "run.json").is_file():
            raise RunError(
                f"{self.path} is not a run directory, it has no run.json: give another, or, if the "
                "run was ended while it began, remove the directory and start it again"
            )
        check_entries(self.path)
        return self.path

    def read_split(self, seed: int) -> SplitRecord:
        """What is written down about the split of a seed."""
        return read_record(self.path / "splits" / f"seed-{seed}.json", SplitRecord)

    def write_split(self, split: Split, samples: Samples, seed: int) -> None:
        folder = _make(self.path / "splits")
        write_durably(folder / f"seed-{seed}.safetensors", split.to_bytes())
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
        write_durably(folder / f"seed-{seed}.json", signed(about))

    def write_sites(
        self, number: int, seen: Sequence[int], scores: Sequence[AgentScores], seed: int
    ) -> None:
        """In the place of a split: what sites said of theirs, which stays with them."""
        folder = _make(self.path / "splits")
        told = {s.agent: (s.name, s.train_samples, s.test_samples) for s in scores}
        sites = [told.get(agent, (str(agent), 0, 0)) for agent in range(number)]
        about = {
            "sha256": "",
            "classes": [],
            "unseen": sorted(set(range(number)) - set(seen)),
            "number": number,
            "agents": [
                {"name": name, "train": train, "validation": 0, "test": test, "counts": []}
                for name, train, test in sites[:LISTED]
            ],
        }
        write_durably(folder / f"seed-{seed}.json", signed(about))

    def write_model(self, name: str, seed: int, server: State, round: int) -> None:
        """The server's state after ``round`` rounds."""
        path = self.part("methods", name, seed) / f"model-round-{round:06d}.safetensors"
        write_durably(path, tensor_pieces(server))

    def write_failure(
        self, name: str, seed: int, reason: str, warnings: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Why a method could not be trained; what it had until then stays beside it."""
        path = self.part("methods", name, seed) / "failure.json"
        about = {"reason": reason, **({"warnings": list(warnings)} if warnings else {})}
        write_durably(path, signed(about))

    def write_timing(self, **values: Any) -> None:
        path = self.path / "timing.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite(values), allow_nan=False) + "\n")
        except OSError as error:
            raise cannot_write(path, error) from error

    def timing(self) -> list[dict[str, Any]]:
        """Wall-clock values, but for lines that are damaged or were cut by a full disk."""
        path = self.path / "timing.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with suppress(RunError):
                found.append(checked(TimingLine, line, path).model_dump())
        return found


def class_counts(split: Split, samples: Samples, agent: int) -> list[int]:
    """How many samples of each class an agent holds; for regression just how many samples."""
    rows = [*split.train[agent], *split.validation[agent], *split.test[agent]]
    if not samples.classes:
        return [len(rows)]
    counts: list[int] = torch.bincount(
        samples.targets[rows], minlength=len(samples.classes)
    ).tolist()
    return counts


def _make(path: Path) -> Path:
    try:
        make_private(path)
    except OSError as error:
        raise _cannot_make(path, error) from error
    return path


def _cannot_make(path: Path, error: OSError) -> RunError:
    if is_full(error):
        return cannot_write(path, error)
    return RunError(
        f"{path} can't be created ({error.strerror}): choose a writable place with --out"
    )
