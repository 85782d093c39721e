"""Fetches a data set: from its official archive, a mirror, or a local file.

Files get their final names only after all files of the data set have been verified.
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
from nufed.data.omniglot import check_omniglot
from nufed.data.sources import check_writers
from nufed.data.store import Stored, data_directory
from nufed.errors import InputError

CHECKS = {"mnist-writers": check_writers, "omniglot": check_omniglot}  # of files that users make
MAX_BYTES = 400_000_000  # that an archive may unpack to; the real ones have 190 million


def fetch(
    stored: Stored,
    *,
    url: str | None = None,
    archive: Path | None = None,
    on_progress: OnProgress | None = None,
    timeout: float = 30.0,
    attempts: int = 5,
) -> bool:
    """Put the files of a data set into the data directory; False if all were there and valid.

    They come from ``archive`` if it is given, which is not changed, else from ``url``, else from
    the official address. Where the official source has single files, ``archive`` is a directory
    that holds them and ``url`` the address of one.
    """
    if url is not None and archive is not None:
        raise InputError("both --url and --from were given: give one of them")
    if not stored.url:
        _take(stored, archive)
        return True
    if stored.complete():
        return False
    directory = _made(data_directory())
    if stored.single_files:
        if archive is not None:
            _copy_files(stored, archive)
        else:
            _download_files(stored, url or stored.url, on_progress, timeout, attempts)
        return True
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
            f"the file at {url} can't be used for {stored.name} ({error}) and was removed: run the "
            "command again, or give another address with --url or the archive itself with --from"
        ) from error
    discard(part)
    return True


class _UnusableError(Exception):
    """Why an archive can't be used."""


def _take(stored: Stored, given: Path | None) -> None:
    """Copy a data set that the user made, after checking its layout."""
    (file,) = stored.files
    if given is None:
        raise InputError(
            f"{stored.name} can't be downloaded as one file: docs/data.md says how to make {file} "
            f"from public files, then run `nufed data get {stored.name} --from {file}`"
        )
    with _opened(given) as source:
        content = source.read(MAX_BYTES)
    CHECKS[stored.name](content, given)
    _made(data_directory())
    with _staged(stored) as staged, staged[file].open("wb") as target:
        target.write(content)
        _sync(target)


def _copy_files(stored: Stored, given: Path) -> None:
    """Copy the files of a data set from a directory, after verifying them."""
    with _staged(stored) as staged:
        for file, sha256 in stored.files.items():
            source = given / file.rpartition("/")[2]
            try:
                with _opened(source) as content:
                    _write_checked(source.name, content, staged[file], sha256)
            except _UnusableError as error:
                raise InputError(
                    f"{source} can't be used for {stored.name} ({error}): --from must be a "
                    f"directory with unchanged copies of the files at {stored.url}"
                ) from error


def _download_files(
    stored: Stored, url: str, on_progress: OnProgress | None, timeout: float, attempts: int
) -> None:
    """Download the files of a data set one by one, and verify them."""
    directory, base = data_directory(), url.rstrip("/") + "/"
    done, parts = 0, {}
    for file in stored.files:
        name = file.rpartition("/")[2]
        parts[file] = directory / f"{name}.part"

        def report(now: int, _: int | None, before: int = done) -> None:
            if on_progress is not None:
                on_progress(before + now, stored.size or None)

        download(base + name, parts[file], on_progress=report, timeout=timeout, attempts=attempts)
        done += parts[file].stat().st_size
    try:
        with _staged(stored) as staged:
            for file, part in parts.items():
                with _opened(part) as content:
                    _write_checked(
                        part.name.removesuffix(".part"), content, staged[file], stored.files[file]
                    )
    except _UnusableError as error:
        for part in parts.values():
            discard(part)
        raise InputError(
            f"the files at {base} can't be used for {stored.name} ({error}) and were removed: run "
            "the command again, or give another address with --url or a directory with --from"
        ) from error
    for part in parts.values():
        discard(part)


def _unpack(stored: Stored, archive: Path) -> None:
    """Extract the files of a data set, and nothing else, from an archive."""
    with _opened(archive) as raw, _staged(stored) as staged:
        missing = dict(stored.files)
        try:
            # no name in the archive becomes a path: known names are looked up, others skipped
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
    """The regular files of a .tar.gz, in order; read each before requesting the next."""
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
    """A gzip file that raises an error beyond ``MAX_BYTES``, against decompression bombs."""

    def read(self, size: int | None = -1) -> bytes:
        block = super().read(size)
        if self.tell() > MAX_BYTES:
            raise tarfile.ReadError(f"it unpacks to more than {MAX_BYTES / 1e6:.0f} MB")
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
    """Temporary paths to write files to; renamed on success, removed on failure."""
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
                with suppress(OSError):  # removes an empty directory only
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
        f"the data directory {directory} can't be written ({error.strerror}): fix that, or "
        "set NUFED_DATA to another directory"
    )


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
