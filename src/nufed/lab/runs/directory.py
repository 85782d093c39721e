"""Layout of a run directory, and how its files are written. Mode 0700: only its owner may enter.

::

    config.toml                     the configuration with every default written out
    run.json                        sealed: the same configuration, format version, measure,
                                    engines, software; written last: without it the run has not
                                    started
    splits/seed-0.safetensors       the rows of every agent, with its SHA-256
    splits/seed-0.json              class counts of the first 1000 agents, how a table is prepared
    methods/NAME/seed-0/
        metrics.jsonl               one line per round
        checkpoint-000020.safetensors   sealed; the last two are kept, and the best round's
        states/000020/7.safetensors the state of agent 7 after round 20, if agents have any
        personal/7.safetensors      sealed: the final personal model of agent 7, if it has a state
        agents.jsonl                one line per agent: scores of the final model
        agents-chosen.jsonl         the same with the step sizes of fine-tuning that were chosen
        resampled.jsonl             with few agents: scores on resamples of their samples
        step-sizes.json             those tried and chosen, if there are validation samples
        warnings.jsonl              numerical problems found, if any
        failure.json                instead of the others, if training failed: the reason
        model.safetensors           the state of the server that results show; "model" is the
                                    meta-model
        model-last.safetensors      the last one, if results show that of an earlier round
        done.json                   marks completion, with the SHA-256 of the files above
        model-round-000010.safetensors   the server's state, every save_every rounds
    baselines/NAME/seed-0/agents.jsonl   the null baselines, in the same form
    bundles/NAME.nufed              the meta-model of each method, first seed, to be adapted
    results.json                    the results table
    privacy.json                    of a federation with noisy updates: epsilon spent
    bounds.json, advice.json        results of `nufed bounds` and `nufed advise`, if they were run
    timing.jsonl                    wall-clock times; everything above is reproducible
    federation.json, log.txt        of a federation: the run's identifier at its sites; a log (or
                                    log.jsonl), status.json and traffic.jsonl
    audit.jsonl                     its hash-chained audit log
    locks/                          of parts that processes of a job array train (`--part`)
    tensorboard/                    event files, with `nufed run --tensorboard`
    figures/, report.html           drawn from the files above
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nufed.algorithms.protocol import State
from nufed.data import Samples, Split
from nufed.errors import RunError
from nufed.evaluate import AgentScores
from nufed.lab.config.split_file import split_bytes
from nufed.lab.files import (
    TEMPORARY,
    cannot_write,
    is_full,
    make_private,
    tensor_pieces,
    write_durably,
    write_sealed,
)
from nufed.lab.runs.json_files import check_entries, finite, read_record, valid_lines
from nufed.lab.runs.records import (
    LISTED,
    AgentCounts,
    Failure,
    SplitRecord,
    TimingLine,
    WarningLine,
)

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
                how = f", or resume its run with `nufed run --resume {out}`"
                raise RunError(
                    f"{out} exists and is not empty, and a run never overwrites: give another --out"
                    + (how if (out / "run.json").exists() else "")
                )
            return cls(_make(out))
        number = 1
        while True:
            path = Path("runs") / f"{name}-{number:03d}"
            try:
                make_private(path, exist_ok=False)
            except FileExistsError:  # possibly created by a concurrent run
                number += 1
            except OSError as error:
                raise _cannot_make(path, error) from error
            else:
                return cls(path)

    @classmethod
    def shared(cls, out: Path) -> RunDirectory:
        """The directory of a run that several processes start together, created if missing."""
        directory = cls(_make(out))
        # listed first: whoever writes a further entry has written run.json before
        others = {path.name for path in out.iterdir() if not path.name.endswith(TEMPORARY)}
        if others - {"config.toml", "lock", "splits"} and not (out / "run.json").exists():
            raise RunError(f"{out} is not empty and holds no run: give another --out")
        return directory

    def part(self, kind: str, name: str, seed: int) -> Path:
        """The directory of one method or baseline and seed; ``kind`` is methods or baselines."""
        return _make(self.path / kind / name / f"seed-{seed}")

    def bundles(self) -> Path:
        """The directory of bundles."""
        return _make(self.path / "bundles")

    def existing(self) -> Path:
        """The path, if it holds a run and no links or special files."""
        if not (self.path / "run.json").is_file():
            raise RunError(
                f"{self.path} is not a run directory, it has no run.json: give another, or, if the "
                "run was killed while it started, remove the directory and start it again"
            )
        check_entries(self.path)
        return self.path

    def read_split(self, seed: int) -> SplitRecord:
        """The record of a seed's split."""
        return read_record(self.split_file(seed), SplitRecord)

    def split_file(self, seed: int) -> Path:
        """The file of that record."""
        return self.path / "splits" / f"seed-{seed}.json"

    def write_split(self, split: Split, samples: Samples, seed: int) -> None:
        """A seed's split, and its record."""
        folder = _make(self.path / "splits")
        write_durably(folder / f"seed-{seed}.safetensors", split_bytes(split))
        agents = [
            AgentCounts(
                name=name,
                train=len(split.train[agent]),
                validation=len(split.validation[agent]),
                test=len(split.test[agent]),
                counts=class_counts(split, samples, agent),
            )
            for agent, name in enumerate(split.names[:LISTED])
        ]
        record = SplitRecord(
            sha256=split.fingerprint,
            classes=list(samples.classes),
            unseen=list(split.unseen),
            number=len(split.agents),
            agents=agents,
            owners=samples.owners is not None,
            preparation=samples.preparation,
        )
        write_sealed(self.split_file(seed), record.model_dump())

    def write_sites(
        self,
        number: int,
        seen: Sequence[int],
        scores: Sequence[AgentScores],
        seed: int,
        names: Mapping[int, str],
    ) -> None:
        """Instead of a split, which stays at the sites: the sample counts that they reported.

        ``names`` are those of sites, also of such that sent no scores.
        """
        reported = {s.agent: (s.name, s.train_samples, s.test_samples) for s in scores}
        agents = []
        for agent in range(min(number, LISTED)):
            silent = names.get(agent, str(agent)), 0, 0
            name, train, test = reported.get(agent, silent)
            agents.append(AgentCounts(name=name, train=train, validation=0, test=test, counts=[]))
        unseen = sorted(set(range(number)) - set(seen))
        record = SplitRecord(sha256="", classes=[], unseen=unseen, number=number, agents=agents)
        _make(self.path / "splits")
        write_sealed(self.split_file(seed), record.model_dump(exclude_none=True))

    def write_model(self, name: str, seed: int, server: State, round: int) -> None:
        """The server's state after ``round`` rounds."""
        path = self.part("methods", name, seed) / f"model-round-{round:06d}.safetensors"
        write_durably(path, tensor_pieces(server))

    def write_failure(
        self, name: str, seed: int, reason: str, warnings: Sequence[WarningLine] = ()
    ) -> None:
        """Record why a method could not be trained; its other files are kept."""
        path = self.part("methods", name, seed) / "failure.json"
        failure = Failure(reason=reason, warnings=list(warnings))
        write_sealed(path, failure.model_dump(exclude_defaults=True))

    def write_timing(self, **values: Any) -> None:
        path = self.path / "timing.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite(values), allow_nan=False) + "\n")
        except OSError as error:
            raise cannot_write(path, error) from error

    def timing(self) -> list[TimingLine]:
        """Wall-clock times; lines that are damaged or were truncated by a full disk are skipped."""
        return valid_lines(self.path / "timing.jsonl", TimingLine)


def class_counts(split: Split, samples: Samples, agent: int) -> list[int]:
    """The number of an agent's samples by class; for regression the number of all its samples."""
    rows = [*split.train[agent], *split.validation[agent], *split.test[agent]]
    if not samples.classes:
        return [len(rows)]
    counts: list[int] = torch.bincount(
        samples.targets[rows], minlength=len(samples.classes)
    ).tolist()
    return counts


def new_file(stem: str, suffix: str, out: Path | None = None) -> Path:
    """``out``, or the next free ``runs/STEM-001``; no older file is overwritten."""
    if out is not None:
        if out.exists():
            raise RunError(f"{out} exists, and nothing is overwritten: give another --out")
        _make(out.parent)
        return out
    folder = _make(Path("runs"))
    number = 1
    while (path := folder / f"{stem}-{number:03d}{suffix}").exists():
        number += 1
    return path


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
        f"{path} can't be created ({error.strerror}): choose a writable directory with --out"
    )
