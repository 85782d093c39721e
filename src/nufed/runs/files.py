"""JSON files of a run directory, and that it holds nothing but files and directories of its own."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nufed.errors import RunError
from nufed.runs.durable import read_signed, write_durably
from nufed.runs.records import T, checked


def check_entries(path: Path) -> None:
    """Refuse a run directory with anything inside but directories and files of its own.

    Symbolic and hard links lead reading and writing elsewhere; FIFOs, sockets and devices block or
    do worse. Nufed makes none of them, and this opens nothing. The path itself may be a link: the
    user has given it.
    """
    for entry in path.rglob("*"):
        try:
            about = entry.lstat()
        except OSError as error:
            raise RunError(f"{entry} can't be read: {error.strerror}") from error
        kind = _foreign(about)
        if kind is None:
            continue
        copy = (
            f"if you trust where it leads, copy the run with `cp -RL {path} COPY` and use the copy"
        )
        raise RunError(
            f"{entry} is a {kind}, and a run directory may hold only files of its own: "
            + (copy if "link" in kind else "remove it")
        )


def _foreign(about: os.stat_result) -> str | None:
    """What an entry is, if it must not be in a run directory."""
    if stat.S_ISLNK(about.st_mode):
        return "symbolic link"
    if stat.S_ISREG(about.st_mode):
        return "hard link to another file" if about.st_nlink > 1 else None
    return None if stat.S_ISDIR(about.st_mode) else "special file (a FIFO, socket or device)"


def write_json(path: Path, value: Any) -> None:
    """Indented JSON; values that are not finite become null."""
    text = json.dumps(finite(value), indent=1, allow_nan=False) + "\n"
    write_durably(path, text.encode())


def read_lines(path: Path, model: type[T]) -> list[T]:
    """The records of a file that has one per line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}") from error
    return [checked(model, line, path, number) for number, line in enumerate(lines, start=1)]


def finite(value: Any) -> Any:
    """The value with null in the place of every number that is not finite, as JSON needs it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def read_record(path: Path, model: type[T]) -> T:
    """What stands in a signed file, as a record."""
    return checked(model, read_about(path), path)


def read_about(path: Path) -> Any:
    """What stands in a signed file, as JSON.

    A run.json, a split's or a failure's file of before they were signed, whose own keys stand
    outermost, is taken as it is.
    """
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found.keys() & {"format", "number", "reason"}:
            return found
    try:
        return read_signed(path)
    except RunError as error:
        raise RunError(f"{error}: put back a copy of it, or start a new run") from error
