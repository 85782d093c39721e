"""A bundle on disk: a directory, or one ``.nufed`` file (a zip that stores its parts as they are).

Reading is careful: a file is taken only if its bytes are exactly what writing its parts gives.
That leaves no room for paths that lead elsewhere, for compression bombs, hidden or double parts,
or a single flipped bit.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, cast

from nufed.errors import InputError
from nufed.runs.durable import Pieces, write_durably

MANIFEST, WEIGHTS, CARD = "bundle.json", "model.safetensors", "card.md"
PARTS = (MANIFEST, CARD, WEIGHTS)
MOST_TEXT = 1_000_000  # bytes of the manifest and of the card
MOST_BYTES = 2**33  # of a whole file
SUFFIX = ".nufed"


def write_parts(path: Path, parts: Mapping[str, bytes | Pieces]) -> None:
    """Write a ``.nufed`` file, or with any other name a directory, whole or not at all."""
    if path.suffix == SUFFIX:
        write_durably(path, _packed(parts))
        return
    if path.exists():
        raise InputError(f"{path} exists: give a new directory, or a name that ends in {SUFFIX}")
    path.mkdir(parents=True)
    for name in (CARD, WEIGHTS, MANIFEST):  # without the last it is no bundle
        write_durably(path / name, parts[name])


def read_parts(path: Path) -> dict[str, bytes]:
    """The parts of a bundle; what is no bundle, or not safe to read, is refused."""
    try:
        if path.is_dir():
            return {name: _read(path / name) for name in PARTS}
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"it is larger than {MOST_BYTES} bytes")
        content = path.read_bytes()
        parts = _unpacked(content)
        if not _same(_packed(parts), content):
            raise InputError("its bytes are not those that nufed writes for its parts")
        return parts
    except Exception as error:  # whatever a crafted file does to zipfile
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{path} can't be read as a bundle ({reason}): get it again from where it came from"
        ) from error


def _read(path: Path) -> bytes:
    if path.is_symlink():
        raise InputError(f"{path.name} is a symbolic link")
    if path.name != WEIGHTS and path.stat().st_size > MOST_TEXT:
        raise InputError(f"{path.name} is larger than {MOST_TEXT} bytes")
    return path.read_bytes()


def _packed(parts: Mapping[str, bytes | Pieces]) -> Pieces:
    """One archive, the same bytes for the same parts."""
    file = _Collected()
    with zipfile.ZipFile(cast(IO[bytes], file), "w", zipfile.ZIP_STORED) as archive:
        for name in PARTS:
            part = parts[name]
            pieces = [part] if isinstance(part, bytes) else part
            info = zipfile.ZipInfo(name)  # dated 1980, as long as nothing else is said
            info.create_system = 3  # the same on every system
            info.file_size = sum(map(len, pieces))
            with archive.open(info, "w") as entry:
                for piece in pieces:
                    entry.write(piece)
    return file.pieces


class _Collected:
    """A file that keeps what is written to it in pieces, as they are; a rewrite replaces one."""

    def __init__(self) -> None:
        self._by_place: dict[int, bytes | memoryview] = {}
        self._place = 0

    @property
    def pieces(self) -> Pieces:
        return [piece for _, piece in sorted(self._by_place.items(), key=lambda item: item[0])]

    def write(self, piece: bytes | memoryview) -> int:
        self._by_place[self._place] = piece
        self._place += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> int:
        self._place = place
        return place

    def flush(self) -> None:
        pass


def _same(pieces: Pieces, content: bytes) -> bool:
    """Whether the pieces make up the content."""
    ends = list(accumulate(map(len, pieces), initial=0))
    view = memoryview(content)
    return ends[-1] == len(content) and all(
        piece == view[start:end] for piece, (start, end) in zip(pieces, pairwise(ends), strict=True)
    )


def _unpacked(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if sorted(entry.filename for entry in entries) != sorted(PARTS):
            raise InputError(f"it must hold {', '.join(PARTS)} and nothing else")
        for entry in entries:
            stored = entry.compress_type == zipfile.ZIP_STORED
            if not stored or entry.file_size != entry.compress_size:
                raise InputError(f"{entry.filename} is compressed, and a bundle's parts never are")
            most = len(content) if entry.filename == WEIGHTS else MOST_TEXT
            if entry.file_size > most:
                raise InputError(f"{entry.filename} is larger than {most} bytes")
        return {entry.filename: archive.read(entry) for entry in entries}
