"""JSON files of a run directory, and that all of its files lie there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nufed.errors import RunError
from nufed.runs.durable import read_signed, write_durably


def refuse_links(path: Path) -> None:
    """Refuse a run directory with symbolic links inside, which lead reading and writing elsewhere.

    Nufed makes none. The path itself may be one: the user has given it.
    """
    link = next((entry for entry in path.rglob("*") if entry.is_symlink()), None)
    if link is not None:
        raise RunError(
            f"{link} is a symbolic link, and files of a run must lie in its directory: if you "
            f"trust where it leads, copy the run with `cp -RL {path} COPY` and use the copy"
        )


def write_json(path: Path, value: Any) -> None:
    """Indented JSON; values that are not finite become null."""
    text = json.dumps(finite(value), indent=1, allow_nan=False) + "\n"
    write_durably(path, text.encode())


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


def read_about(path: Path) -> dict[str, Any]:
    """What stands in run.json, a split's or a failure's file.

    They are signed; those of before that, whose own keys stand outermost, are taken as they are.
    """
    with suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found.keys() & {"format", "number", "reason"}:
            return found
    try:
        return read_signed(path)
    except RunError as error:
        raise RunError(f"{error}: put back a copy of it, or start a new run") from error
