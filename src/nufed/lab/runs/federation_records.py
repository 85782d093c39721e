"""The schema of the JSON files that only federations have.

Beside ``privacy.json``, ``federation.json`` and ``excluded.json``, a server writes for operators::

    status.json    the current state, replaced atomically every few seconds
    traffic.jsonl  one line for each answered or unanswered request: its site, seconds and bytes

and a site ``activity-NUMBER.json`` for its administrator and its metrics. These are wall-clock
records: nothing that is reproducible depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from filelock import FileLock
from pydantic import Field

from nufed.errors import RunError
from nufed.lab.files import make_private
from nufed.lab.runs.json_files import Record, Whole, checked, valid_lines, write_json

Epsilon = Annotated[float, Field(ge=0, allow_inf_nan=True)]


class Epsilons(Record):
    released: Epsilon
    server: Epsilon


class Budget(Record):
    released: Epsilon | None
    server: Epsilon | None


class Updates(Record):
    """The most noisy updates of any site."""

    charged: Whole
    claimed: Whole


class HoldsFor(Record):
    released: str
    server: str


class PrivacyRecord(Record):
    """``privacy.json``: the privacy spent by a federation with noisy updates."""

    clip: float
    noise: float
    delta: float
    epsilon: Epsilons
    updates: Updates | None = None
    budget: Budget
    holds_for: HoldsFor
    agents: Whole
    cohort: Whole
    rounds: Whole
    scores_sent: bool


class FederationRecord(Record):
    """``federation.json``: the run's identifier at the sites, the digest of its configuration in
    checkpoints, and the seed of secret cohorts."""

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    configuration: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    cohort_seed: Annotated[int, Field(ge=0, lt=2**128)] | None = None


class RoundReason(Record):
    """A round, and why a site was excluded, or its update or scores left out, in it."""

    round: Whole
    reason: str


class ExclusionsRecord(Record):
    """``excluded.json``: agents that are not sent requests any more, by their numbers."""

    agents: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], RoundReason]


STATUS, TRAFFIC = "status.json", "traffic.jsonl"
Seconds = Annotated[float, Field(ge=0)]
Time = Annotated[float, Field(ge=0)]  # seconds since 1970
Phase: TypeAlias = Literal["query", "train", "secure sum", "evaluate"]
State: TypeAlias = Literal["waiting for sites", "training", "evaluating", "finished", "failed"]


class SiteStatus(Record):
    """One site, as the server sees it; times are None for a site that was never connected.

    A connected site that has ``joined`` is sent training requests; others have not identified
    themselves yet, or are ``excluded`` for this reason.
    """

    number: Whole
    name: str
    connected: bool = False
    joined: bool = False
    excluded: str | None = None
    last_seen: Time | None = None
    left_out: Whole = 0
    last_left_out: RoundReason | None = None


class StatusRecord(Record):
    """``status.json``. ``rounds_timed`` rounds took ``round_seconds`` in total, ``last_seconds``
    the last one; ``seconds_left`` is the estimate for all others, None before the first."""

    name: str
    state: State
    round: Whole
    rounds: Whole
    started: Time
    updated: Time
    sites: list[SiteStatus]
    rounds_timed: Whole = 0
    round_seconds: Seconds = 0.0
    last_seconds: Seconds | None = None
    seconds_left: Seconds | None = None
    bytes_down: Whole = 0
    bytes_up: Whole = 0
    left_out: dict[str, Whole] = Field(default={})
    epsilon: dict[Literal["released", "server"], float | None] = Field(default={})
    failure: str | None = None


class TrafficLine(Record):
    """A line of ``traffic.jsonl``: a request to a site. ``bytes_up`` is 0 without an answer."""

    round: Whole
    phase: Phase
    agent: Whole
    seconds: Seconds
    bytes_down: Whole
    bytes_up: Whole


def read_status(folder: Path) -> StatusRecord:
    """The status of the federation in a run directory."""
    path = folder / STATUS
    try:
        return checked(StatusRecord, path.read_bytes(), path)
    except OSError as error:
        raise RunError(
            f"{path} can't be read ({error.strerror}): the run has not started yet, or {folder} is "
            "not the run directory of a federation on the server's machine"
        ) from error


def read_traffic(folder: Path) -> list[TrafficLine]:
    """The requests of a run; lines that a kill has truncated are skipped."""
    return valid_lines(folder / TRAFFIC, TrafficLine)


class SiteActivity(Record):
    """``activity-NUMBER.json`` in a site's folder; counts are over all runs."""

    number: Whole
    name: str = ""
    updated: Seconds = 0.0
    round: Whole = 0
    rounds: Whole = 0
    samples: dict[str, Whole] = Field(default={})  # by part
    requests: dict[str, Whole] = Field(default={})  # by kind
    seconds: dict[str, Seconds] = Field(default={})  # by kind
    failures: Whole = 0
    last_failure: str = ""
    bytes_received: Whole = 0
    bytes_sent: Whole = 0
    measure: str = ""
    score: float | None = None
    epsilon: float | None = None  # against the server, in the current run


def activity_file(folder: Path, number: int) -> Path:
    return folder / f"activity-{number}.json"


def read_activity(folder: Path, number: int) -> SiteActivity:
    """What a site has recorded; nothing yet if there is no valid file."""
    path = activity_file(folder, number)
    with suppress(OSError, RunError):
        return checked(SiteActivity, path.read_bytes(), path)
    return SiteActivity(number=number)


def add_activity(
    folder: Path, number: int, counts: Mapping[str, Any], latest: Mapping[str, Any]
) -> None:
    """Add ``counts`` to those of the file, by kind where they are mappings; replace ``latest``."""
    make_private(folder)
    path = activity_file(folder, number)
    with FileLock(f"{path}.lock"):
        record = read_activity(folder, number).model_dump()
        for key, value in counts.items():
            if isinstance(value, Mapping):
                record[key] |= {k: record[key].get(k, 0) + v for k, v in value.items()}
            else:
                record[key] += value
        write_json(path, {**record, **latest})
