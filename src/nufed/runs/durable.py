"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nufed.errors import RunError


def write_durably(path: Path, content: bytes) -> None:
    """Write a file so that after any crash the old one, the new one or none is there, never a part.

    The content goes to a temporary name in the same directory, is synced, and then gets its name;
    the directory is synced too.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def sync_directory(folder: Path) -> None:
    """Make renames in a directory last."""
    if os.name != "posix":  # elsewhere directories can't be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> RunError:
    """What to say when a file of a run can't be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(
            f"{path} can't be written, the disk is full: free some space there and continue with "
            f"`nufed run --resume`; what was saved before is kept"
        )
    return RunError(
        f"{path} can't be written ({error.strerror}): make it writable and continue with "
        "`nufed run --resume`; what was saved before is kept"
    )


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a directory; the system ends the lock with the process."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(
                f"{folder} is in use by another run: wait until it ends, or give another --out"
            ) from None
        yield
