"""JSON files of a run directory; refusal of links and special files in it."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nufed.errors import RunError
from nufed.files import read_sealed, write_durably
from nufed.lab.runs.records import T, checked


def check_entries(path: Path) -> None:
    """Refuse a run directory that contains anything but directories and regular files.

    Symbolic and hard links redirect reads and writes; FIFOs, sockets and devices block or have side
    effects. Nufed creates none of them, and this opens nothing. The path itself may be a link,
    because the user gave it.
    """
    for entry in path.rglob("*"):
        try:
            about = entry.lstat()
        except FileNotFoundError:  # removed meanwhile by a process that trains a part of the run
            continue
        except OSError as error:
            raise RunError(f"{entry} can't be read: {error.strerror}") from error
        mode, advice = about.st_mode, "remove it"
        if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and about.st_nlink == 1):
            continue
        kind = "special file (a FIFO, socket or device)"
        if stat.S_ISLNK(mode) or stat.S_ISREG(mode):
            kind = "symbolic link" if stat.S_ISLNK(mode) else "hard link to another file"
            advice = (
                f"if you trust its target, copy the run with `cp -RL {path} COPY` and use the copy"
            )
        raise RunError(
            f"{entry} is a {kind}; a run directory may contain only directories and regular files: "
            f"{advice}"
        )


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON; non-finite values become null."""
    text = json.dumps(finite(value), indent=1, allow_nan=False) + "\n"
    write_durably(path, text.encode())


def read_lines(path: Path, model: type[T]) -> list[T]:
    """The records of a JSON Lines file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}") from error
    return [checked(model, line, path, number) for number, line in enumerate(lines, start=1)]


def finite(value: Any) -> Any:
    """The value with every non-finite number replaced by None, as JSON requires."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def read_record(path: Path, model: type[T]) -> T:
    """The JSON of a sealed file, as a record."""
    return checked(model, read_about(path), path)


def read_about(path: Path) -> dict[str, Any]:
    """The JSON of a sealed file."""
    try:
        return read_sealed(path).about
    except RunError as error:
        raise RunError(f"{error}: restore it from a backup, or start a new run") from error
