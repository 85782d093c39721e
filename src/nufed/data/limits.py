"""Reads users' data files, up to a size limit that is checked before unpacking."""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from nufed.errors import InputError, shown

MOST_BYTES = 2**31  # that the arrays of a file may take in memory
LIMIT = "NUFED_DATA_LIMIT"  # environment variable that overrides it
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # of np.savez; others are unbounded


def data_limit() -> int:
    """The maximum size in bytes of a file's data: ``NUFED_DATA_LIMIT``, or ``MOST_BYTES``."""
    given = os.environ.get(LIMIT)
    if not given:
        return MOST_BYTES
    if not given.isdecimal() or not int(given):
        raise InputError(f"{LIMIT} = {shown(given)}: must be a number of bytes, above 0")
    return int(given)


def check_size(size: int, what: str, limit: int) -> None:
    """Refuse a size above the limit."""
    if size > limit:
        raise InputError(
            f"{what} {size:,} bytes, and {limit:,} is the limit: to allow it, set {LIMIT} to the "
            "number of bytes that data may take in memory"
        )


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file within the limit."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise InputError("it is not a regular file")
    check_size(about.st_size, "it has", limit)
    with path.open("rb") as file:
        return file.read(about.st_size)


def read_npz(content: bytes, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Those of the named arrays that an NPZ file holds; their sizes are checked before unpacking.

    Only arrays of numbers, booleans and strings are read.
    """
    left, arrays = data_limit(), {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        for name in names:
            entry = entries.get(f"{name}.npy")
            if entry is None:
                continue
            if entry.compress_type not in _COMPRESSIONS:
                raise ValueError(f"{name} has a compression that np.savez does not use")
            with archive.open(entry) as file:
                arrays[name] = _read_array(file, name, left)
            left -= arrays[name].nbytes
    return arrays


def read_npy(content: bytes) -> np.ndarray[Any, Any]:
    """The array of an NPY file; its size is checked before it is read."""
    return _read_array(io.BytesIO(content), "its array", data_limit())


def _read_array(file: IO[bytes], name: str, limit: int) -> np.ndarray[Any, Any]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{name} has version {version} of the NPY format")
    read_header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
    shape, by_columns, dtype = read_header(file)
    if dtype.kind not in "biufUS" or min(shape, default=0) < 0:
        raise ValueError(f"{name} is of {dtype} and shape {shape}, not of numbers or strings")
    count = prod(shape)  # Python integers do not overflow
    size = count * dtype.itemsize
    check_size(size, f"{name} unpacks to", limit)
    unpacked = file.read(size)
    if len(unpacked) != size or file.read(1):
        raise ValueError(f"{name} does not have the size that its header states")
    array = np.frombuffer(unpacked, dtype, count)
    return array.reshape(shape, order="F" if by_columns else "C")
