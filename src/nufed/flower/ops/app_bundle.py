"""An app as Flower sends it (its bundle, a zip file), and the digest of what is in it."""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from flwr.cli.build import build_fab_from_disk

from nufed.errors import InputError
from nufed.files import sha256

MANIFEST = ".info/CONTENT"  # derived from the other files
MAX_BYTES = 50 * 2**20  # unpacked; Flower's limit of a bundle is 10 MiB


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
            names = [entry.filename for entry in entries]
            if len(set(names)) < len(names):
                raise InputError("the app's bundle has two files of the same name")
            return {name: archive.read(name) for name in sorted(names) if name != MANIFEST}
    except BadZipFile as error:
        raise InputError(f"the app's bundle is not a zip file ({error})") from None


def bundle_digest(bundle: bytes) -> str:
    """SHA-256 of the paths and contents of a bundle's files.

    Two machines may compress the same files to different bundles.
    """
    listed = [f"{sha256(content)} {name}\n" for name, content in bundled_files(bundle).items()]
    return sha256("".join(listed).encode())
