"""What a site records about its own work, for its administrator and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock
from pydantic import Field

from nufed.errors import RunError
from nufed.files import make_private
from nufed.runs.json_files import write_json
from nufed.runs.records import Record, Whole, checked

Seconds = Annotated[float, Field(ge=0)]


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
