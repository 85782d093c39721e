"""Who holds which rows, and which of them are for training, validation and test."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from nufed.data.partition import Rows
from nufed.errors import InputError
from nufed.seeding import stream

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Split:
    """The rows of every agent in three disjoint parts, and the agents held out from training.

    Agents are numbered from 0; ``names`` are what people call them.
    """

    train: list[Rows]
    validation: list[Rows]
    test: list[Rows]
    names: tuple[str, ...]
    unseen: tuple[int, ...] = ()

    @property
    def agents(self) -> range:
        return range(len(self.names))

    @property
    def seen(self) -> list[int]:
        """The agents that take part in training."""
        return sorted(set(self.agents) - set(self.unseen))

    def all_rows(self) -> list[Rows]:
        """The rows of every part of every agent."""
        return [*self.train, *self.validation, *self.test]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything the split holds."""
        digest = hashlib.sha256(json.dumps([self.names, self.unseen]).encode())
        for name, array in sorted(self._arrays().items()):
            digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the split to ``path`` (safetensors)."""
        path.write_bytes(self._serialised())

    @classmethod
    def load(cls, path: Path) -> Split:
        """Read a split back; a file with any other byte than :meth:`save` writes is refused."""
        try:
            with safe_open(path, framework="numpy") as file:
                about = json.loads(file.metadata()["nufed"])
                rows = {
                    p: _unpack(file.get_tensor(p), file.get_tensor(p + "_sizes")) for p in PARTS
                }
            split = cls(**rows, names=tuple(about["names"]), unseen=tuple(about["unseen"]))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} can't be read as a split: {error}") from error
        if split._serialised() != Path(path).read_bytes():
            raise InputError(f"{path} is damaged: this split does not match its SHA-256")
        return split

    def _serialised(self) -> bytes:
        # one metadata key: safetensors does not keep the order of several
        about = {"names": self.names, "unseen": self.unseen, "sha256": self.fingerprint}
        return save(self._arrays(), metadata={"nufed": json.dumps(about)})

    def _arrays(self) -> dict[str, Rows]:
        arrays = {}
        for part in PARTS:
            rows: list[Rows] = getattr(self, part)
            arrays[part] = np.concatenate(rows).astype(np.int64)
            arrays[part + "_sizes"] = np.array([len(r) for r in rows], dtype=np.int64)
        return arrays


def part_sizes(samples: int, validation: float, test: float, name: str = "") -> list[int]:
    """How many of an agent's samples are for training, validation and test.

    Of n rows round(test·n) are for test and round(validation·n) for validation; the rest train.
    """
    tests, validations = round(test * samples), round(validation * samples)
    trains = samples - tests - validations
    if trains < 1 or (test > 0 and tests < 1) or (validation > 0 and validations < 1):
        raise InputError(
            f"agent {name} has {samples} samples, too few for a training part beside "
            f"validation = {validation} and test = {test}: give it more samples or change "
            "these fractions"
        )
    return [trains, validations, tests]


def make_split(
    rows: list[Rows],
    seed: int,
    *,
    validation: float,
    test: float,
    unseen_agents: int = 0,
    names: tuple[str, ...] | None = None,
) -> Split:
    """Cut every agent's rows into disjoint parts, and pick the agents held out from training."""
    names = names or tuple(str(agent) for agent in range(len(rows)))
    parts = []
    for agent, own in enumerate(rows):
        sizes = part_sizes(len(own), validation, test, names[agent])
        shuffled = stream(seed, "parts", agent=agent).permutation(own)
        parts.append(np.split(shuffled, np.cumsum(sizes)[:-1]))
    return split_of_parts(parts, seed, unseen_agents, names)


def split_of_parts(
    parts: list[list[Rows]], seed: int, unseen_agents: int, names: tuple[str, ...] | None = None
) -> Split:
    """A split from every agent's training, validation and test rows."""
    if not 0 <= unseen_agents < len(parts):
        raise InputError(
            f"unseen_agents = {unseen_agents}: of {len(parts)} agents at least one must take part "
            f"in training, so it must lie in 0 … {len(parts) - 1}"
        )
    unseen = stream(seed, "unseen").choice(len(parts), unseen_agents, replace=False)
    train, validation, test = (list(column) for column in zip(*parts, strict=True))
    names = names or tuple(str(agent) for agent in range(len(parts)))
    return Split(train, validation, test, names, tuple(sorted(unseen.tolist())))


def _unpack(rows: Rows, sizes: Rows) -> list[np.ndarray[Any, Any]]:
    return np.split(rows, np.cumsum(sizes)[:-1])
