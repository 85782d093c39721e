"""What a federation's server writes about itself while it trains, for operators.

::

    status.json    the current state, replaced atomically every few seconds
    traffic.jsonl  one line for each answered or unanswered request: its site, seconds and bytes

Both are wall-clock records: nothing that is reproducible depends on them.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from nufed.errors import RunError
from nufed.runs.records import Record, Whole, checked

STATUS, TRAFFIC = "status.json", "traffic.jsonl"
Seconds = Annotated[float, Field(ge=0)]
Time = Annotated[float, Field(ge=0)]  # seconds since 1970
Phase: TypeAlias = Literal["query", "train", "secure sum", "evaluate"]
State: TypeAlias = Literal["waiting for sites", "training", "evaluating", "finished", "failed"]


class LastLeftOut(Record):
    """When and why an update or scores of a site were left out."""

    round: Whole
    reason: str


class SiteStatus(Record):
    """One site, as the server sees it; times are None for a site that was never connected.

    A connected site that has ``joined`` is asked to train; others have not answered yet, or are
    ``excluded`` for this reason.
    """

    number: Whole
    name: str
    connected: bool = False
    joined: bool = False
    excluded: str | None = None
    last_seen: Time | None = None
    left_out: Whole = 0
    last_left_out: LastLeftOut | None = None


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
    path, found = folder / TRAFFIC, []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(RunError):
            found.append(checked(TrafficLine, line, path))
    return found
