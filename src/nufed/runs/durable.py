"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from nufed.errors import RunError

TEMPORARY = ".tmp"
Pieces: TypeAlias = Sequence[bytes | memoryview]
"""A file's content as pieces one after another, so that a large one need not be copied."""


def write_durably(path: Path, content: bytes | Pieces) -> None:
    """Write a file so that after any crash the old one, the new one or none is there, never a part.

    The content goes to a temporary name in the same directory, is synced, and then gets its name;
    the directory is synced too.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            for piece in _pieces(content):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise cannot_write(path, error) from error


def make_private(folder: Path, *, exist_ok: bool = True) -> None:
    """Make a directory that only its owner may enter, whatever the umask.

    One that is there keeps its mode; parents that are missing get the usual one.
    """
    folder.mkdir(0o700, parents=True, exist_ok=exist_ok)


def remove_temporary(folder: Path) -> None:
    """Remove what a kill in the middle of :func:`write_durably` left."""
    for path in folder.glob(f".*{TEMPORARY}"):
        try:
            path.unlink()
        except OSError as error:
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


def is_full(error: OSError) -> bool:
    """Whether there is no space left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def cannot_write(path: Path, error: OSError) -> RunError:
    """What to say when a file of a run can't be written."""
    if is_full(error):
        return RunError(
            f"{path} can't be written, the disk is full: free some space there and continue with "
            f"`nufed run --resume`; what was saved before is kept"
        )
    return RunError(
        f"{path} can't be written ({error.strerror}): make it writable and continue with "
        "`nufed run --resume`; what was saved before is kept"
    )


def sha256(content: bytes | Pieces) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(content):
        digest.update(piece)
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, which is not read into memory as a whole."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pieces(content: bytes | Pieces) -> Pieces:
    return [content] if isinstance(content, bytes) else content


def signed(content: Mapping[str, Any]) -> bytes:
    """JSON with its own SHA-256, so that a flipped bit shows."""
    text = json.dumps(content, sort_keys=True)
    return json.dumps({"content": content, "sha256": sha256(text.encode())}, indent=1).encode()


def read_signed(path: Path) -> dict[str, Any]:
    """What :func:`signed` made; a file with any other byte is refused."""
    try:
        return verified(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}") from error
    except RunError as error:
        raise RunError(f"{path} {error}") from None


def verified(text: bytes) -> dict[str, Any]:
    """The content of what :func:`signed` made; any other byte is refused."""
    try:
        content: dict[str, Any] = json.loads(text)["content"]
        if text == signed(content):
            return content
    except (ValueError, KeyError, TypeError, RecursionError):  # the last: nested without end
        pass
    raise RunError("is damaged or was changed: it does not match its SHA-256")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a directory; the system ends the lock with the process."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    try:
        file = (folder / "lock").open("w")
    except OSError as error:
        raise cannot_write(folder / "lock", error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(
                f"{folder} is in use by another run: wait until it ends, or give another --out"
            ) from None
        yield
