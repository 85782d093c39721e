"""A site's persistent record between rounds, in one sealed file.

A site can't know whether the server accepted its last update: it may have been late, rejected, or
from a round that was retried or redone after a crash. So it stores two states: before and after its
last update. The server names the last round whose update of this site it accepted, and the site
continues from the state of that round.

A site with noisy updates stores the last one before sending it: a repeated request gets identical
bytes, which reveal nothing new. It also counts them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from nufed.algorithms.protocol import Cost, State
from nufed.errors import RunError
from nufed.files import make_private, read_sealed, write_sealed


def default_folder() -> Path:
    """Where sites store their states unless told otherwise."""
    return Path.home() / ".nufed" / "sites"


@dataclass(frozen=True)
class Release:
    """The last noisy update, and the number of releases.

    Args:
        store: random id of this file, so that the loss of a file is detected.
        noise: noise multiplier of the updates.
        count: number of updates released since the file was created.
        before: number of releases that the server knew of at that time.
        question: digest of the request that the last one answers.
        cost: its computational cost.
        vectors: the vectors sent.
    """

    store: str
    noise: float
    count: int = 0
    before: int = 0
    question: str = ""
    cost: Cost = field(default_factory=Cost)
    vectors: State = field(default_factory=dict)

    def after(self, question: str, vectors: State, cost: Cost) -> Release:
        """The record after one more noisy update."""
        return replace(self, count=self.count + 1, question=question, vectors=vectors, cost=cost)


@dataclass(frozen=True)
class SiteRecord:
    """The states before and after the last update, with their rounds; with privacy also the last
    release."""

    rounds: tuple[int, int] = (0, 0)
    before: State = field(default_factory=dict)
    after: State = field(default_factory=dict)
    release: Release | None = None

    def state(self, taken: int) -> State | None:
        """The state after round ``taken``; None if it is not stored."""
        return {self.rounds[0]: self.before, self.rounds[1]: self.after}.get(taken) or None

    def with_update(self, taken: int, before: State, round: int, after: State) -> SiteRecord:
        """The record after an update in ``round``."""
        return replace(self, rounds=(taken, round), before=before, after=after)


def load_record(path: Path, like: State) -> SiteRecord:
    """The file's record, with states that have the names and shapes of ``like``.

    A missing or damaged file, or one of another model, gives an empty record.
    """
    try:
        found = read_sealed(path)
    except RunError:
        return SiteRecord()
    about = found.about
    parts: dict[str, State] = {"before": {}, "after": {}, "release": {}}
    for key, tensor in found.tensors.items():
        part, _, name = key.partition("/")
        parts[part] = {**parts[part], name: tensor}
    vectors, fields = parts.pop("release"), about["release"]
    fits = {part: state if _same_layout(state, like) else {} for part, state in parts.items()}
    release = None
    if fields:
        release = Release(**{**fields, "cost": Cost(**fields["cost"])}, vectors=vectors)
    return SiteRecord(tuple(about["rounds"]), **fits, release=release)


def save_record(path: Path, record: SiteRecord) -> None:
    """Write the file atomically."""
    release = record.release
    parts = {"before": record.before, "after": record.after}
    if release:
        parts["release"] = release.vectors
    tensors = {
        f"{part}/{name}": tensor for part, state in parts.items() for name, tensor in state.items()
    }
    fields = asdict(replace(release, vectors={})) if release else {}
    fields.pop("vectors", None)
    try:
        make_private(path.parent.parent)  # the site's folder
        make_private(path.parent)  # the run's, in it
    except OSError as error:
        raise RunError(f"{path.parent} can't be created: {error.strerror}") from error
    write_sealed(path, {"rounds": record.rounds, "release": fields}, tensors)


def _same_layout(state: State, like: State) -> bool:
    return state.keys() == like.keys() and all(
        (state[k].shape, state[k].dtype) == (like[k].shape, like[k].dtype) for k in like
    )
