"""Getting a data set: from its official archive, a mirror, or a file that is here already.

A file gets its final name only when all files of the data set are known to be right.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from nufed.data.download import OnProgress, discard, download
from nufed.data.sources import check_writers
from nufed.data.store import Stored, data_directory
from nufed.errors import InputError

LARGEST = 400_000_000  # bytes that an archive may unpack to; the real ones have 190 million


def fetch(
    stored: Stored,
    *,
    url: str | None = None,
    archive: Path | None = None,
    on_progress: OnProgress | None = None,
    timeout: float = 30.0,
    attempts: int = 5,
) -> bool:
    """Put the files of a data set into the data directory; False if all were there and right.

    They come from ``archive`` if it is given, which is left as it is, else from ``url``, else from
    the official address.
    """
    if url is not None and archive is not None:
        raise InputError("both --url and --from were given: give one of them")
    if not stored.url:
        _take(stored, archive)
        return True
    if stored.complete():
        return False
    directory = _made(data_directory())
    if archive is not None:
        try:
            _unpack(stored, archive)
        except _UnusableError as error:
            raise InputError(
                f"{archive} can't be used for {stored.name} ({error}): it must be an unchanged "
                f"copy of {stored.url}"
            ) from error
        return True
    part = directory / (stored.url.rsplit("/", 1)[-1] + ".part")
    url = url or stored.url
    download(url, part, on_progress=on_progress, timeout=timeout, attempts=attempts)
    try:
        _unpack(stored, part)
    except _UnusableError as error:
        discard(part)
        raise InputError(
            f"what {url} gave can't be used for {stored.name} ({error}) and was removed: run the "
            "command again, or give another address with --url or the archive itself with --from"
        ) from error
    discard(part)
    return True


class _UnusableError(Exception):
    """Why an archive can't be used."""


def _take(stored: Stored, given: Path | None) -> None:
    """Copy a data set that a person has made, once its layout is known to be right."""
    (file,) = stored.files
    if given is None:
        raise InputError(
            f"{stored.name} can't be downloaded as one file: docs/data.md says how to make {file} "
            f"from public files, then run `nufed data get {stored.name} --from {file}`"
        )
    with _opened(given) as source:
        content = source.read(LARGEST)
    check_writers(content, given)
    _made(data_directory())
    with _staged(stored) as staged, staged[file].open("wb") as target:
        target.write(content)
        _sync(target)


def _unpack(stored: Stored, archive: Path) -> None:
    """Take the files of a data set, and nothing else, out of an archive."""
    with _opened(archive) as raw, _staged(stored) as staged:
        missing = dict(stored.files)
        try:
            # no name in the archive becomes a path: known names are looked up, others passed over
            for name, content in _members(raw):
                if name in missing:
                    _write_checked(name, content, staged[name], missing.pop(name))
                if not missing:
                    break
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
            raise _UnusableError(f"not a whole .tar.gz: {error}") from error
        if missing:
            raise _UnusableError(f"{', '.join(missing)} is not in it")


def _members(raw: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    """The regular files of a .tar.gz, in order, to be read before the next is asked for."""
    with (
        _BoundedGzip(fileobj=raw) as unzipped,
        tarfile.open(fileobj=unzipped, mode="r|") as tar,
    ):
        for member in tar:
            if member.isreg() and not member.issparse():
                content = tar.extractfile(member)
                assert content is not None
                yield member.name.removeprefix("./"), content


class _BoundedGzip(gzip.GzipFile):
    """A compressed file that ends in an error rather than fill memory or disk."""

    def read(self, size: int | None = -1) -> bytes:
        block = super().read(size)
        if self.tell() > LARGEST:
            raise tarfile.ReadError(f"it unpacks to more than {LARGEST / 1e6:.0f} MB")
        return block


def _write_checked(name: str, content: IO[bytes], path: Path, sha256: str) -> None:
    found = hashlib.sha256()
    with path.open("wb") as target:
        while block := content.read(1 << 20):
            found.update(block)
            target.write(block)
        _sync(target)
    if found.hexdigest() != sha256:
        raise _UnusableError(f"the SHA-256 of {name} differs from the official file's")


@contextmanager
def _staged(stored: Stored) -> Iterator[dict[str, Path]]:
    """Paths to write files to; they get their names if all goes well, and are removed if not."""
    directory = data_directory()
    staged = {file: directory / f"{file}.new" for file in stored.files}
    try:
        for path in staged.values():
            path.parent.mkdir(exist_ok=True)
        yield staged
        for file, path in staged.items():
            path.replace(directory / file)
    except OSError as error:
        raise _unwritable(directory, error) from error
    finally:
        for path in staged.values():
            with suppress(OSError):
                path.unlink()
            if path.parent != directory:
                with suppress(OSError):  # only an empty directory goes
                    path.parent.rmdir()


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path} can't be read ({error.strerror}): give a file") from error


def _made(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(directory, error) from error
    return directory


def _unwritable(directory: Path, error: OSError) -> InputError:
    return InputError(
        f"the data directory {directory} can't be written ({error.strerror}): put that right, or "
        "set NUFED_DATA to another directory"
    )


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
