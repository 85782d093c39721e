"""The apps that a site has approved: it runs no other, whatever its server sends."""

from __future__ import annotations

import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from io import BytesIO
from pathlib import Path
from typing import Any

from nufed.config.schema import Config, within
from nufed.errors import InputError, shown, visible
from nufed.files import make_private, sha256, write_durably
from nufed.flower.ops.app_bundle import build_bundle, bundle_digest, bundled_files

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
        """Those of a site with this folder of its state."""
        return cls(folder / "approved")

    def has(self, digest: str) -> bool:
        """Whether the app with this digest is approved."""
        return any(self.folder.glob(f"*-{digest}{SUFFIX}"))

    def last(self) -> Path | None:
        """The bundle that was approved last."""
        return next((path for path in reversed(self._files()) if _counts(path)), None)

    def outdated(self) -> str:
        """What to add to "not approved" if there are approvals with the digest of the past."""
        return "" if all(map(_counts, self._files())) else OUTDATED

    def refusal(self, bundle: bytes) -> str:
        """Why an app may not run; empty if it is approved, or a run of an approved app with other
        settings within the bounds of its ``[approval]``."""
        digest = bundle_digest(bundle)
        if self.has(digest):
            return ""
        counted = [path.read_bytes() for path in reversed(self._files()) if _counts(path)]
        found = [_beyond(approved, bundle) for approved in counted]
        if "" in found:
            return ""
        why = next((f"; {reason}" for reason in found if reason), "")
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
    """How a bundle exceeds the bounds of an approved one; None if it is another app."""
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
    """Why the lines that are shown of a file may not be what is in it."""
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
