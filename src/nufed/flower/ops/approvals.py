"""The apps that a site has approved; it refuses to run any other that a server sends.

Approved is the digest of what is in an app's bundle, the zip file that Flower sends. What is
unpacked must be what was approved, on every system: a bundle with a name that a system could unpack
to another place, or could show as another name, is refused.
"""

from __future__ import annotations

import tokenize
import tomllib
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

from nufed.errors import InputError, in_short, shown, visible
from nufed.flower.internals import build_fab_from_disk
from nufed.lab.config.schema import Config, within
from nufed.lab.files import canonical, make_private, sha256, write_durably

MANIFEST = ".info/CONTENT"  # derived from the other files, and not unpacked to the app
MAX_BYTES = 50 * 2**20  # unpacked; Flower's limit of a bundle is 10 MiB
FORMAT = "nufed app 2"  # of the digest; the first was over lines "SHA-256 NAME"
DEVICES = {  # names that Windows opens instead of a file, with any extension
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


SUFFIX = ".fab"
CONFIG = "federation.toml"
NOT_APPROVED = (
    "has not approved this app (digest {}{}): review it, then run nufed federate approve APP at "
    "the site"
)
OUTDATED = "; approvals by an earlier version of nufed do not count: approve again"


@dataclass(frozen=True)
class Approvals:
    """Approved bundles, ``NUMBER-DIGEST.fab`` in a site's folder; removing one withdraws it."""

    folder: Path

    @classmethod
    def of_site(cls, folder: Path) -> Approvals:
        """The approvals of the site whose state is in this folder."""
        return cls(folder / "approved")

    def has(self, digest: str) -> bool:
        """Whether the app with this digest is approved."""
        return any(self.folder.glob(f"*-{digest}{SUFFIX}"))

    def last(self) -> Path | None:
        """The bundle that was approved last."""
        return next((path for path in reversed(self._files()) if _counts(path)), None)

    def outdated(self) -> str:
        """A hint for the error "not approved", if approvals use the digest of an older release."""
        return "" if all(map(_counts, self._files())) else OUTDATED

    def refusal(self, bundle: bytes) -> str:
        """Why an app may not run; empty if it is approved, or a run of an approved app with other
        settings within the bounds of its ``[approval]``."""
        digest = bundle_digest(bundle)
        if self.has(digest):
            return ""
        counted = [path.read_bytes() for path in reversed(self._files()) if _counts(path)]
        differences = [_beyond(approved, bundle) for approved in counted]
        if "" in differences:
            return ""
        why = next((f"; {reason}" for reason in differences if reason), "")
        return NOT_APPROVED.format(digest, why) + self.outdated()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"*-*{SUFFIX}"))

    def diff(self, bundle: bytes) -> list[str]:
        """How a bundle differs from the last approved one, or from nothing.

        A line "file NAME: …" for every file that differs, then its lines that do. Lines of files
        begin with +, - or a space, so that none can look like a "file" line. Control characters
        are not escaped.
        """
        last = self.last()
        before = bundled_files(last.read_bytes()) if last else {}
        after = bundled_files(bundle)
        lines: list[str] = []
        for name in sorted(before | after):
            old, new = before.get(name), after.get(name)
            if old != new:
                # not ASCII: it could be reversed, invisible or look like another name
                shown = name.encode("unicode_escape").decode()
                old_name, new_name = ("/dev/null" if x is None else shown for x in (old, new))
                lines.append(f"file {shown}: {_changed(old, new)}{_warnings(name, new)}")
                lines += unified_diff(_lines(old), _lines(new), old_name, new_name, lineterm="")
        return lines

    def add(self, bundle: bytes) -> str:
        """Approve a bundle; returns its digest."""
        digest, files = bundle_digest(bundle), self._files()
        if not self.has(digest):
            number = int(files[-1].name.partition("-")[0]) + 1 if files else 1
            make_private(self.folder)
            write_durably(self.folder / f"{number:06d}-{digest}{SUFFIX}", bundle)
        return digest


def read_app(app: Path) -> bytes:
    """The bundle of an app: a directory, or a file that `flwr build` made."""
    if app.is_dir():
        return build_bundle(app)
    try:
        bundle = app.read_bytes()
    except OSError as error:
        raise InputError(
            f"{app} can't be read ({error.strerror}): give an app directory"
        ) from error
    bundled_files(bundle)
    return bundle


def _beyond(approved: bytes, bundle: bytes) -> str | None:
    """Which bounds of an approved app a bundle exceeds; None if it is another app."""
    before, after = bundled_files(approved), bundled_files(bundle)
    texts = before.pop(CONFIG, b""), after.pop(CONFIG, b"")
    if before != after:
        return None
    try:
        then, now = (tomllib.loads(text.decode()) for text in texts)
        bounds = Config.model_validate({"approval": then["approval"]}).approval
    except (ValueError, KeyError, RecursionError):  # no TOML, or without bounds
        return None
    for path, value in _changes(then, now):
        *tables, name = path
        left_out = tables == ["methods"] and value is None and now.get("methods")
        bounded = (
            path == ("rounds",) or tables[:1] in (["method"], ["methods"])
        ) and name in bounds
        # what a key that is removed leaves is checked by the app itself
        if left_out or (bounded and (value is None or within(value, bounds[name]))):
            continue
        low, high = bounds[name] if bounded else (0, 0)
        how = f"outside of the approved {low:g} … {high:g}" if bounded else "not what was approved"
        return f"{visible('.'.join(path))} = {shown(value)} is {how}"
    return ""


def _changes(
    then: Mapping[str, Any], now: Mapping[str, Any], *path: str
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The paths of values that differ, and the new ones; None: there is none."""
    for key in {**then, **now}:
        old, new = then.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changes(old, new, *path, key)
        elif repr(old) != repr(new):  # as 1 == True
            yield (*path, key), new


def _counts(path: Path) -> bool:
    """Whether an approval has the digest of its bundle."""
    with suppress(InputError):
        return path.stem.partition("-")[2] == bundle_digest(path.read_bytes())
    return False


def _changed(old: bytes | None, new: bytes | None) -> str:
    if new is None:
        return "removed"
    size = f"{len(new)} bytes, SHA-256 {sha256(new)}"
    return f"added, {size}" if old is None else f"changed from SHA-256 {sha256(old)} to {size}"


def _warnings(name: str, content: bytes | None) -> str:
    """Why the shown lines of a file may differ from its content."""
    if content is None:
        return ""
    text = _text(content)
    if text is None:
        return "; not text, so its lines are not shown"
    lines = text.removesuffix("\n").split("\n")
    odd = [n for n, line in enumerate(lines, 1) if not line.replace("\t", "").isprintable()]
    said = ""
    if odd:
        listed = ", ".join(map(str, odd[:20])) + (", …" if len(odd) > 20 else "")
        said += f"; control or invisible characters in line {listed}, escaped below"
    if name.endswith(".py"):
        try:
            encoding = tokenize.detect_encoding(BytesIO(content).readline)[0]
        except SyntaxError:
            encoding = "unknown"
        if encoding not in ("utf-8", "utf-8-sig"):
            said += f"; Python reads it as {encoding[:40]}, not as the UTF-8 below"
    return said


def _text(content: bytes) -> str | None:
    """The content as text; None if it is not."""
    with suppress(UnicodeDecodeError):
        return None if b"\0" in content else content.decode()
    return None


def _lines(content: bytes | None) -> list[str]:
    """Lines of a text; other characters that end lines elsewhere stay in them, to be seen."""
    text = _text(content) if content else None
    if not text:
        return []
    *lines, rest = text.split("\n")
    return [*lines, rest, "\\ No newline at end of file"] if rest else lines
