"""Atomic, durable file writes; files sealed with their SHA-256."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from nufed.errors import ResumableError, RunError

TEMPORARY = ".tmp"
Pieces: TypeAlias = Sequence[bytes | memoryview]
"""A file's content as consecutive buffers, so that large ones need not be copied."""


def write_durably(path: Path, content: bytes | Pieces) -> None:
    """Write a file atomically: after a crash it has the old or the new content (or is missing).

    The content is written to a temporary file in the same directory, synced and renamed; then the
    directory is synced.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            for piece in _pieces(content):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise cannot_write(path, error) from error


def cache_directory() -> Path:
    """``nufed`` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nufed"


def make_private(folder: Path, *, exist_ok: bool = True) -> None:
    """Create a directory of mode 0700, whatever the umask.

    An existing one keeps its mode; missing parents get the default mode.
    """
    folder.mkdir(0o700, parents=True, exist_ok=exist_ok)


def remove_temporary(folder: Path) -> None:
    """Remove temporary files left by a kill during :func:`write_durably`."""
    for path in folder.glob(f".*{TEMPORARY}"):
        try:
            path.unlink()
        except OSError as error:
            raise cannot_write(path, error) from error


def sync(path: Path) -> None:
    """Make the content of a file, or the renames in a directory, durable."""
    is_folder = path.is_dir()
    if is_folder and os.name != "posix":  # other systems can't open directories
        return
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: OSError) -> bool:
    """Whether the disk or the quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def cannot_write(path: Path, error: OSError) -> RunError:
    """The error for a file of a run that can't be written."""
    why, remedy = f" ({error.strerror})", "make it writable"
    if is_full(error):
        why, remedy = ", the disk is full", "free some space there"
    return ResumableError(
        f"{path} can't be written{why}", remedy, "; what was saved before is kept"
    )


def sha256(content: bytes | Pieces) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(content):
        digest.update(piece)
    return digest.hexdigest()


def canonical(*parts: object) -> bytes:
    r"""Parts of a digest or a signature as bytes, different ones for different parts.

    Parts are None, booleans, numbers, text, bytes, lists (or tuples) of these, and mappings from
    text. It is JSON with sorted keys, and bytes as ``b"HEX"``, which no JSON value is. Joined
    strings are not different: ``"a\nb" + "\n" + "c"`` has two readings.

    >>> canonical("a", 1, [b"\x01\x02", "0102"])
    b'["a", 1, [b"0102", "0102"]]'
    """
    return _canonical(parts).encode()


def _canonical(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return f'b"{bytes(value).hex()}"'
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a mapping in a digest must have text as keys")
        pairs = (f"{_canonical(key)}: {_canonical(value[key])}" for key in sorted(value))
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_canonical, value)) + "]"
    if isinstance(value, str):
        value.encode()  # lone surrogates are refused: JSON writes a pair of them as one character
    return json.dumps(value)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pieces(content: bytes | Pieces) -> Pieces:
    return [content] if isinstance(content, bytes) else content


@contextmanager
def locked(folder: Path, name: str = "lock", wait: float = 0) -> Iterator[None]:
    """Hold a lock file of a directory, which the system releases when the process ends.

    Args:
        folder: the directory.
        name: of the file; by default the lock of the whole directory.
        wait: seconds to wait for another process that holds it.
    """
    lock, path = FileLock(folder / name, timeout=wait), folder / name
    try:
        lock.acquire()
    except Timeout:
        used = folder if name == "lock" else path
        raise RunError(
            f"{used} is in use by another run: wait until it ends, or give another --out"
        ) from None
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True)
class Sealed:
    """The content of a sealed file, verified against its SHA-256: JSON and tensors."""

    about: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)


# A sealed file starts with one of these prefixes, then its SHA-256 in hexadecimal. The digest is
# that of the file with zeros in its place, so that it covers every byte.
SEALED_TEXT = b'{\n "sha256": "'
SEALED_TENSORS = b'{"__metadata__":{"sha256":"'  # after the eight bytes of the header's length
ZERO_DIGEST = b"0" * 64


def seal(about: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Pieces:
    """The content of a sealed file: with tensors a safetensors file whose metadata hold the JSON
    and the SHA-256; without tensors a JSON text that contains its SHA-256.

    >>> unseal(b"".join(seal({"round": 3}, {"w": torch.ones(2)})))
    Sealed(about={'round': 3}, tensors={'w': tensor([1., 1.])})
    """
    if tensors is not None:
        metadata = {"sha256": ZERO_DIGEST.decode(), "about": json.dumps(about)}
        length, header, *rest = tensor_pieces(tensors, metadata)
        start = bytes(length) + bytes(header)
    else:
        text = {"sha256": ZERO_DIGEST.decode(), "about": about}
        start, rest = json.dumps(text, indent=1).encode() + b"\n", []
    place = start.index(ZERO_DIGEST)
    digest = sha256([start, *rest]).encode()
    return [start[:place] + digest + start[place + len(ZERO_DIGEST) :], *rest]


def write_sealed(
    path: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Seal JSON and tensors and write them durably."""
    write_durably(path, seal(about, tensors))


def unseal(content: bytes) -> Sealed:
    """Verify and parse a sealed file; any changed byte is refused before parsing."""
    skip = 0 if content.startswith(SEALED_TEXT) else 8
    prefix = SEALED_TENSORS if skip else SEALED_TEXT
    place = skip + len(prefix)
    view = memoryview(content)
    whole: Pieces = [view[:place], ZERO_DIGEST, view[place + len(ZERO_DIGEST) :]]
    if content[skip:place] == prefix and sha256(whole).encode() == view[place:][: len(ZERO_DIGEST)]:
        try:
            if not skip:
                return Sealed(_mapping(json.loads(content)["about"]))
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            return Sealed(_mapping(json.loads(header["__metadata__"]["about"])), load(content))
        except (ValueError, KeyError, TypeError, RecursionError, SafetensorError):
            pass  # crafted: the digest is valid, the content is not
    raise RunError(
        "is damaged, or another version of nufed wrote it: it does not match its SHA-256"
    )


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not a mapping")
    return value


def read_sealed(path: Path) -> Sealed:
    """Read a file written by :func:`write_sealed`."""
    try:
        return unseal(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}") from error
    except RunError as error:
        raise RunError(f"{path} {error}") from None


def tensor_pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Pieces:
    """The same bytes as ``safetensors.torch.save``, without a copy; tensors may share memory.

    Unlike there, metadata keep their order.

    >>> tensors = {"b": torch.ones(2), "a": torch.zeros(3, 1, dtype=torch.int64)}
    >>> b"".join(tensor_pieces(tensors)) == save(tensors)
    True
    """
    # safetensors itself determines the order of tensors and the names of dtypes
    empty = save({name: torch.empty(0, dtype=t.dtype) for name, t in tensors.items()})
    header = json.loads(empty[8:])
    parts = [_bytes_of(tensors[name]) for name in header]
    ends = accumulate((part.nbytes for part in parts), initial=0)
    for (name, about), offsets in zip(header.items(), pairwise(ends), strict=True):
        about["shape"], about["data_offsets"] = list(tensors[name].shape), list(offsets)
    if metadata is not None:
        header = {"__metadata__": dict(metadata), **header}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *parts]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # with fewer than two numbers the stride is arbitrary
    return flat.view(torch.uint8).numpy().data
