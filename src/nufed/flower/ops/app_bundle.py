"""An app as Flower sends it (its bundle, a zip file), and the digest of what is in it.

What is unpacked must be what was approved, on every system: a bundle with a name that a system
could unpack to another place, or could show as another name, is refused.
"""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path, PurePosixPath
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

from flwr.cli.build import build_fab_from_disk

from nufed.errors import InputError, in_short
from nufed.files import canonical, sha256

MANIFEST = ".info/CONTENT"  # derived from the other files, and not unpacked to the app
MAX_BYTES = 50 * 2**20  # unpacked; Flower's limit of a bundle is 10 MiB
FORMAT = "nufed app 2"  # of the digest; the first was over lines "SHA-256 NAME"
DEVICES = {  # that Windows opens instead of a file, whatever the extension
    *("con", "prn", "aux", "nul", "conin$", "conout$"),
    *(f"{device}{number}" for device in ("com", "lpt") for number in "0123456789¹²³"),
}


def build_bundle(app: Path) -> bytes:
    """The bundle that `flwr run` would send of an app directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a library that Flower uses
        try:
            return build_fab_from_disk(app)
        except (OSError, ValueError) as error:
            text = " ".join(str(error).split())
            raise InputError(f"{app} is not an app that Flower can send: {text}") from None


def bundled_files(bundle: bytes) -> dict[str, bytes]:
    """The files of a bundle, by path, as they would be unpacked."""
    try:
        with ZipFile(BytesIO(bundle)) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > MAX_BYTES:
                raise InputError(f"the app's bundle has more than {MAX_BYTES} bytes unpacked")
            if any(entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED) for entry in entries):
                raise InputError("the app's bundle has a compression that Flower does not use")
            names = [entry.orig_filename for entry in entries]
            if len(set(names)) < len(names):
                raise InputError("the app's bundle has two files of the same name")
            check_names(names)
            if names != [
                entry.filename for entry in entries
            ]:  # a second name in a zip's extra field
                raise InputError("the app's bundle has a file with two names")
            return {name: archive.read(name) for name in sorted(names) if name != MANIFEST}
    except InputError:
        raise
    except Exception as error:  # zipfile may raise anything on a foreign file
        raise InputError(f"the app's bundle is not a zip file ({in_short(error)})") from None


def check_names(names: Iterable[str]) -> None:
    """Refuse names of a bundle's files that some system would unpack to others, or to one file."""
    known: dict[str, str] = {}
    for name in names:
        why = "" if name == MANIFEST else _refused(name)
        other = known.setdefault(_as_one_file(name), name)
        if not why and other != name:
            why = f"on some systems it is {_quoted(other)}"
        if why:
            raise InputError(
                f"the app's bundle has a file {_quoted(name)}, which is refused ({why}): give it "
                "another name"
            )
    for key, name in known.items():
        for folder in PurePosixPath(key).parents:
            if str(folder) in known:
                raise InputError(
                    f"the app's bundle has a file {_quoted(known[str(folder)])} and a file "
                    f"{_quoted(name)} in a folder of that name: give one of them another name"
                )


def _quoted(name: str) -> str:
    return ascii(name[:200])


def _refused(name: str) -> str:
    """Why a name is refused; empty if it is not."""
    if any(unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in name):
        return "it has control characters"
    if any(sign in '\\:*?"<>|' for sign in name):
        return 'it has one of \\ : * ? " < > |'
    parts = name.split("/")
    if name.startswith("/"):
        return "it is absolute"
    if any(part in ("", ".", "..") for part in parts):
        return "a part of it is empty, . or .."
    if any(part != part.strip() or part.endswith(".") for part in parts):
        return "a part of it begins or ends with a space, or ends with a dot"
    if any(part.partition(".")[0].rstrip().casefold() in DEVICES for part in parts):
        return "Windows reserves it"
    if _as_one_file(parts[0]) == ".info":
        return "Flower reserves .info"
    return ""


def _as_one_file(name: str) -> str:
    """Names with the same result are one file on some system, or look the same.

    Some systems ignore case or invisible characters, or compose accents.
    """
    seen = "".join(sign for sign in name if unicodedata.category(sign) != "Cf")
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", seen).casefold())


def bundle_digest(bundle: bytes) -> str:
    """SHA-256 of the paths and contents of a bundle's files.

    Two machines may compress the same files to different bundles.
    """
    digests = {name: sha256(content) for name, content in bundled_files(bundle).items()}
    return sha256(canonical(FORMAT, digests))
