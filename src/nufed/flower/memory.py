"""What a site keeps from round to round, in one file of its own.

A site can't know whether the server took its last update: it may have been too late, left out, or
of a round that was tried again or redone after a crash. So it keeps two states: the one its last
work set out from, and the one it led to. The server says which round's update of this site it took
last, and the site goes on from the state of that round.

A site whose updates are noisy keeps the last one, before it is sent: asked the same again, it sends
the same again, which says nothing new. And it counts them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from nufed.algorithm import Cost, State
from nufed.errors import RunError
from nufed.runs.durable import make_private, sha256, write_durably

DIGEST = 64  # letters of a SHA-256


@dataclass(frozen=True)
class Release:
    """The last noisy update, and how many there were.

    Args:
        store: a name made up where nothing was kept, so that a lost file shows.
        noise: the noise of the updates.
        count: how many were made since then.
        before: how many the server knew of then.
        question: what the last one answers.
        cost: what it cost.
        vectors: what was sent.
    """

    store: str
    noise: float
    count: int = 0
    before: int = 0
    question: str = ""
    cost: Cost = field(default_factory=Cost)
    vectors: State = field(default_factory=dict)

    def after(self, question: str, vectors: State, cost: Cost) -> Release:
        """With one noisy update more."""
        return replace(self, count=self.count + 1, question=question, vectors=vectors, cost=cost)


@dataclass(frozen=True)
class Memory:
    """The states that the last work set out from and led to, and the rounds that they are of; and
    the noisy updates, of a site that sends such."""

    rounds: tuple[int, int] = (0, 0)
    before: State = field(default_factory=dict)
    after: State = field(default_factory=dict)
    release: Release | None = None

    def state(self, taken: int) -> State | None:
        """The state after round ``taken``; None if it is not here."""
        return {self.rounds[0]: self.before, self.rounds[1]: self.after}.get(taken) or None

    def with_work(self, taken: int, before: State, round: int, after: State) -> Memory:
        """What to remember after a round's work."""
        return replace(self, rounds=(taken, round), before=before, after=after)


def load_memory(path: Path, like: State) -> Memory:
    """What the file holds, as far as it has the names and shapes of ``like``.

    A file that is not there, is damaged or is of another model holds nothing.
    """
    try:
        content = path.read_bytes()
        digest, packed = content[:DIGEST], content[DIGEST:]
        if sha256(packed).encode() != digest:
            return Memory()
        about_length = int.from_bytes(packed[:8], "big")
        about: dict[str, Any] = json.loads(packed[8 : 8 + about_length])
        tensors = load(packed[8 + about_length :])
    except (OSError, ValueError, SafetensorError):
        return Memory()
    parts: dict[str, State] = {"before": {}, "after": {}, "release": {}}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        parts[part] = {**parts[part], name: tensor}
    vectors, told = parts.pop("release"), about["release"]
    fits = {part: state if _alike(state, like) else {} for part, state in parts.items()}
    release = Release(**{**told, "cost": Cost(**told["cost"])}, vectors=vectors) if told else None
    return Memory(tuple(about["rounds"]), **fits, release=release)


def save_memory(path: Path, memory: Memory) -> None:
    """Write the file, whole or not at all."""
    release = memory.release
    parts = {"before": memory.before, "after": memory.after}
    if release:
        parts["release"] = release.vectors
    tensors = {
        f"{part}/{name}": tensor.detach().cpu().contiguous()
        for part, state in parts.items()
        for name, tensor in state.items()
    }
    told = asdict(replace(release, vectors={})) if release else {}
    told.pop("vectors", None)
    about = json.dumps({"rounds": memory.rounds, "release": told}).encode()
    packed = len(about).to_bytes(8, "big") + about + save(tensors)
    try:
        make_private(path.parent.parent)  # the site's folder
        make_private(path.parent)  # the run's, in it
    except OSError as error:
        raise RunError(f"{path.parent} can't be made: {error.strerror}") from error
    write_durably(path, sha256(packed).encode() + packed)


def _alike(state: State, like: State) -> bool:
    return state.keys() == like.keys() and all(
        (state[k].shape, state[k].dtype) == (like[k].shape, like[k].dtype) for k in like
    )
