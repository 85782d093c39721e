"""A run directory: what a run leaves behind, and where. Only its owner may enter it (mode 0700).

::

    config.toml                     the configuration with every default written out
    run.json                        format version, what agents are scored by, engines, software;
                                    written last: without it no run was begun
    splits/seed-0.safetensors       who holds which rows, with its SHA-256
    splits/seed-0.json              the same as counts of classes per agent, of the first 1000
    methods/NAME/seed-0/
        metrics.jsonl               one line per round
        checkpoint-000020.json, .safetensors   where to go on from; the last two are kept
        agents.jsonl                one line per agent: scores of the final model
        failure.json                instead of the others, if training had to stop, and why
        model.safetensors           the final state of the server; "model" is the meta-model
        done.json                   that it is done, with the SHA-256 of the three above
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
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from nufed.algorithm import State
from nufed.data import Samples, Split
from nufed.errors import InputError, RunError
from nufed.evaluate import AgentScores, Measure
from nufed.runs.config import load_config
from nufed.runs.durable import cannot_write, is_full, make_private, signed, write_durably
from nufed.runs.files import finite, read_about, refuse_links
from nufed.runs.schema import Config

FORMAT = 2
PRIVACY = "privacy.json"
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
        refuse_links(self.path)
        return self.path

    def write_start(
        self,
        config: Config,
        measure: Measure,
        engines: Mapping[str, str],
        samples: Samples,
        data_sha256: str,
    ) -> None:
        """Write down how the run begins; its splits are there already.

        ``samples`` tell what one of them is; ``data_sha256`` is that of all the data.
        """
        self.write_config(config)
        about = {
            "format": FORMAT,
            "measure": {"name": measure.name, "higher_is_better": measure.higher_is_better},
            "engines": dict(engines),
            "config": _settings(config),
            "data_sha256": data_sha256,
            "inputs": _describe(samples),
            "software": {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "threads": config.threads,
                **{package: version(package) for package in ("nufed", "torch", "numpy")},
            },
        }
        write_durably(self.path / "run.json", signed(about))

    def write_config(self, config: Config) -> None:
        write_durably(self.path / "config.toml", config.to_toml().encode())

    def read_config(self, overrides: Sequence[str] = ()) -> Config:
        """The run's configuration; of overrides only more rounds, and workers, are allowed."""
        config = load_config(self.path / "config.toml")
        longer = load_config(self.path / "config.toml", overrides)
        changed = _flat_differences(_settings(config), _settings(longer))
        if changed.keys() - {"rounds"} or longer.rounds < config.rounds:
            raise InputError(
                f"{' '.join(overrides)}: a run that is taken up again keeps its settings; only "
                f"rounds may grow, and it is {config.rounds}"
            )
        return longer

    def engines(self) -> dict[str, Any]:
        """The engines that the run began with."""
        engines: dict[str, Any] = self.about()["engines"]
        return engines

    def check_same(self, config: Config, data_sha256: str, splits: Mapping[int, Split]) -> None:
        """Refuse to go on if the configuration, the data or a split is not that of the start.

        A split's file must have the very bytes that the split would be written as.
        """
        about = self.about()
        now, then = _settings(config), about["config"]
        different = [
            f"{key} was {before!r} and is {after!r}"
            for key, (before, after) in _flat_differences(then, now).items()
            if key != "rounds"
        ]
        if different:
            raise RunError(
                f"{self.path / 'config.toml'} was changed ({'; '.join(different)}): a run goes on "
                "only as it began; change it back, or start a new run"
            )
        if about["data_sha256"] != data_sha256:
            raise RunError(
                f"the data is not that of {self.path} (SHA-256 {data_sha256[:12]} instead of "
                f"{about['data_sha256'][:12]}): give the same data, or start a new run"
            )
        for seed, split in splits.items():
            then, fingerprint = self.read_split(seed)["sha256"], split.fingerprint
            if then != fingerprint:
                raise RunError(
                    f"the split of seed {seed} is not that of {self.path} (SHA-256 "
                    f"{fingerprint[:12]} instead of {then[:12]}): start a new run"
                )
            path = self.path / "splits" / f"seed-{seed}.safetensors"
            if not path.exists():
                write_durably(path, split.to_bytes())
            elif path.read_bytes() != split.to_bytes():
                raise RunError(
                    f"{path} is damaged: remove it and continue with `nufed run --resume`, which "
                    "writes it again"
                )

    def about(self) -> dict[str, Any]:
        """What run.json says."""
        path = self.path / "run.json"
        about = read_about(path)
        try:
            if about["format"] != FORMAT:
                raise RunError(
                    f"{path} has format {about['format']} and this nufed reads {FORMAT}: use the "
                    f"version that wrote it, {about['software']['nufed']}"
                )
        except (KeyError, TypeError) as error:
            raise RunError(f"{path} can't be read: {error}") from error
        return about

    def read_split(self, seed: int) -> dict[str, Any]:
        """What is written down about the split of a seed."""
        return read_about(self.path / "splits" / f"seed-{seed}.json")

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
        tensors = {k: v.detach().cpu().contiguous() for k, v in server.items()}
        path = self.part("methods", name, seed) / f"model-round-{round:06d}.safetensors"
        write_durably(path, save(tensors))

    def write_failure(self, name: str, seed: int, reason: str) -> None:
        """Why a method could not be trained; what it had until then stays beside it."""
        path = self.part("methods", name, seed) / "failure.json"
        write_durably(path, signed({"reason": reason}))

    def write_timing(self, **values: Any) -> None:
        path = self.path / "timing.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite(values), allow_nan=False) + "\n")
        except OSError as error:
            raise cannot_write(path, error) from error

    def timing(self) -> list[dict[str, Any]]:
        """Wall-clock values, but for a line that a full disk cut."""
        path = self.path / "timing.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with suppress(ValueError):
                found.append(json.loads(line))
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


def _settings(config: Config) -> dict[str, Any]:
    """A configuration as plain data, but for the number of workers, which changes no bits."""
    settings: dict[str, Any] = json.loads(config.model_dump_json(exclude={"workers"}))
    return settings


def _describe(samples: Samples) -> dict[str, Any]:
    """What one input and one target are, so that models can be used without the data."""
    if not isinstance(samples.inputs, torch.Tensor):
        return {}
    return {
        "shape": list(samples.input_shape),
        "dtype": str(samples.inputs.dtype).removeprefix("torch."),
        "scale": samples.scale,
        "shift": samples.shift,
        "classes": list(samples.classes),
        "outputs": samples.outputs,
    }


def _flat_differences(
    then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, dotted, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in {**then, **now}:
        a, b = then.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found |= _flat_differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = a, b
    return found


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
