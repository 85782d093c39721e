"""Fetches a data set: from its official archive, a mirror, or a local file.

Files get their final names only after all files of the data set have been verified. Beside
``NAME.part`` of an interrupted download lies ``NAME.part.version``, the ETag or date that the
server gives this version of the file. It is sent as ``If-Range`` on resume, so that two versions
are never mixed.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from typing import IO, Any, TypeAlias
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from nufed.errors import InputError
from nufed.lab.readers.sources import Stored, check_omniglot, check_writers, data_directory

OnProgress: TypeAlias = Callable[[int, int | None], None]  # bytes so far, bytes in all if known

MAX_BYTES = 400_000_000  # the archives have 170 million
FIRST_BACKOFF = 0.5  # seconds before the first retry; doubles with each further one
RETRIABLE = (408, 429)  # statuses, in addition to all from 500
OTHERWISE = "give another address with --url, or the archive itself with --from"


class _RetriableError(Exception):
    """An attempt failed; a retry may succeed."""


def download(
    url: str,
    part: Path,
    *,
    on_progress: OnProgress | None = None,
    timeout: float = 30.0,
    attempts: int = 5,
) -> None:
    """Download the file at ``url`` to ``part``, resuming from what it holds already.

    ``timeout`` is the longest silence on the connection, in seconds.
    """
    _check(url)
    for attempt in range(attempts):
        if attempt:
            time.sleep(FIRST_BACKOFF * 2 ** (attempt - 1))
        try:
            _attempt(url, part, on_progress or (lambda done, total: None), timeout)
            return
        except _RetriableError as error:
            reason = str(error)
        except OSError as error:
            raise InputError(
                f"{part} can't be written ({error.strerror}): fix that and run the command again "
                "to resume, or set NUFED_DATA to another directory"
            ) from error
    raise InputError(
        f"{url} could not be downloaded ({reason}, {attempts} attempts): run the command again to "
        f"resume, or {OTHERWISE}"
    )


def discard(part: Path) -> None:
    """Remove what was downloaded."""
    part.unlink(missing_ok=True)
    _version_file(part).unlink(missing_ok=True)


def _check(url: str) -> None:
    try:
        scheme, host = urlsplit(url).scheme, urlsplit(url).hostname
    except ValueError:
        scheme, host = "", None
    if scheme == "file":
        raise InputError(f"--url {url}: must begin with https:// or http://; give a file to --from")
    if scheme not in ("https", "http") or not host:
        raise InputError(f"--url {url}: must be an address like https://host/file.tar.gz")


def _attempt(url: str, part: Path, on_progress: OnProgress, timeout: float) -> None:
    version = _saved_version(part)
    # without a version the rest might belong to another file
    done = part.stat().st_size if version and part.is_file() else 0
    headers = {"User-Agent": "nufed"}
    if done:
        headers |= {"Range": f"bytes={done}-", "If-Range": version}
    with _open(Request(url, headers=headers), timeout) as response:
        first, total = _extent(response)
        if done and response.status == 416 and total == done:
            return  # an earlier run got all of it
        if response.status == 200:  # the whole file: it has changed, or ranges are not supported
            done = 0
        elif (
            response.status != 206
            or first != done
            or _version(response.headers) not in ("", version)
        ):
            discard(part)
            raise _RetriableError("the server did not send the requested range")
        with part.open("ab" if done else "wb") as file:
            if not done:
                _version_file(part).write_text(_version(response.headers), "latin-1")
            on_progress(done, total)
            for block in _blocks(response):
                done += len(block)
                if done > MAX_BYTES:
                    file.close()
                    discard(part)
                    raise InputError(
                        f"{url} is larger than {MAX_BYTES / 1e6:.0f} MB, so it is not the archive: "
                        + OTHERWISE
                    )
                file.write(block)
                on_progress(done, total)
    if total is not None and done < total:
        raise _RetriableError(f"the connection ended after {done} of {total} bytes")


def _open(request: Request, timeout: float) -> Any:
    """The server's response, which may be 416 (range not satisfiable)."""
    try:
        return urlopen(request, timeout=timeout)
    except HTTPError as error:
        if error.code == 416:
            return error
        error.close()
        reason = f"status {error.code}, {error.reason}"
        if error.code in RETRIABLE or error.code >= 500:
            raise _RetriableError(reason) from error
        raise InputError(
            f"{request.full_url} can't be downloaded ({reason}): {OTHERWISE}"
        ) from error
    except (InvalidURL, ValueError) as error:
        raise InputError(f"{request.full_url} is not a valid address ({error})") from error
    except (OSError, HTTPException) as error:
        raise _RetriableError(_reason(error)) from error


def _blocks(response: HTTPResponse) -> Iterator[bytes]:
    """The body as it arrives: reads of whole blocks would lose data at a timeout."""
    while True:
        try:
            block = response.read1(1 << 16)
        except (OSError, HTTPException) as error:
            raise _RetriableError(_reason(error)) from error
        if not block:
            return
        yield block


def _extent(response: HTTPResponse) -> tuple[int | None, int | None]:
    """The offset of the first byte sent, and the size of the whole file; None if not stated."""
    if response.status == 200:
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if length.isdecimal() else None
    given = response.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(?:(\d+)|\*)", given.strip())
    first, total = match.groups() if match else (None, None)
    return int(first) if first else None, int(total) if total else None


def _version(headers: Message) -> str:
    """The validator of this version of the file that If-Range allows; "" if there is none."""
    etag = headers.get("ETag", "")
    return etag if etag.startswith('"') else headers.get("Last-Modified", "")


def _saved_version(part: Path) -> str:
    file = _version_file(part)
    # forced into one line, since it goes into a header
    return " ".join(file.read_text("latin-1").split()) if file.is_file() else ""


def _version_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.version")


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", None) or error
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


CHECKS = {"mnist-writers": check_writers, "omniglot": check_omniglot}  # of files that users make
MAX_ARCHIVE_BYTES = 400_000_000  # that an archive may unpack to; the real ones have 190 million


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
    that holds them (or the only one itself) and ``url`` the address of one.
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
        content = source.read(MAX_ARCHIVE_BYTES)
    CHECKS[stored.name](content, given)
    _made(data_directory())
    with _staged(stored) as staged, staged[file].open("wb") as target:
        target.write(content)
        _sync(target)


def _copy_files(stored: Stored, given: Path) -> None:
    """Copy the files of a data set from a directory, or its only file, after verifying them."""
    alone = len(stored.files) == 1
    names = ", ".join(file.rpartition("/")[2] for file in stored.files)
    if not given.is_dir() and not (alone and given.is_file()):
        wanted = f"{'the file, or ' * alone}a directory that holds {names}"
        raise InputError(f"--from {given}: must be {wanted}")
    with _staged(stored) as staged:
        for file, sha256 in stored.files.items():
            source = given / file.rpartition("/")[2] if given.is_dir() else given
            try:
                with _opened(source) as content:
                    _write_checked(source.name, content, staged[file], sha256)
            except _UnusableError as error:
                raise InputError(
                    f"{source} can't be used for {stored.name} ({error}): --from must name "
                    f"unchanged copies of the files at {stored.url}"
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
    """A gzip file that raises an error beyond ``MAX_ARCHIVE_BYTES``: no decompression bombs."""

    def read(self, size: int | None = -1) -> bytes:
        block = super().read(size)
        if self.tell() > MAX_ARCHIVE_BYTES:
            raise tarfile.ReadError(f"it unpacks to more than {MAX_ARCHIVE_BYTES / 1e6:.0f} MB")
        return block


def _write_checked(name: str, content: IO[bytes], path: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    with path.open("wb") as target:
        while block := content.read(1 << 20):
            digest.update(block)
            target.write(block)
        _sync(target)
    if digest.hexdigest() != sha256:
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
