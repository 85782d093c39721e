"""The apps that a site has approved: it runs no other, whatever its server sends."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from nufed.errors import InputError
from nufed.files import make_private, write_durably
from nufed.flower.ops.app_bundle import build_bundle, bundle_digest, bundled_files

SUFFIX = ".fab"


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
        return max(self.folder.glob(f"*-*{SUFFIX}"), default=None)

    def diff(self, bundle: bytes) -> list[str]:
        """The lines in which a bundle differs from the last approved one, or from nothing."""
        last = self.last()
        before = bundled_files(last.read_bytes()) if last else {}
        after = bundled_files(bundle)
        lines: list[str] = []
        for name in sorted(before | after):
            old, new = (_lines(files.get(name, b"")) for files in (before, after))
            old_name, new_name = (
                name if name in files else "/dev/null" for files in (before, after)
            )
            lines += unified_diff(old, new, old_name, new_name, lineterm="")
        return lines

    def add(self, bundle: bytes) -> str:
        """Approve a bundle; returns its digest."""
        digest, last = bundle_digest(bundle), self.last()
        if not self.has(digest):
            number = int(last.name.partition("-")[0]) + 1 if last else 1
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


def _lines(content: bytes) -> list[str]:
    return content.decode("utf-8", "backslashreplace").splitlines()
