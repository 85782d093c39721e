"""Downloads a file, resuming an interrupted download.

Beside ``NAME.part`` lies ``NAME.part.version``, the ETag or date that the server gives this version
of the file. It is sent as ``If-Range`` on resume, so that two versions are never mixed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from email.message import Message
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from typing import Any, TypeAlias
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from nufed.errors import InputError

OnProgress: TypeAlias = Callable[[int, int | None], None]  # bytes so far, bytes in all if known

MAX_BYTES = 400_000_000  # the archives have 170 million
FIRST_BACKOFF = 0.5  # seconds before the first retry; doubles with each further one
RETRIABLE = (408, 429)  # statuses, beside all from 500
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
