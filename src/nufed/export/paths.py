"""Checks of the files to write."""

from __future__ import annotations

from pathlib import Path

from nufed.errors import InputError


def check_new(out: Path, suffix: str) -> None:
    """Refuse a file that exists, or whose name has another ending."""
    if out.suffix != suffix:
        raise InputError(f"--out {out}: its name must end in {suffix}")
    if out.exists():
        raise InputError(f"{out} exists, and is not overwritten: give another --out, or remove it")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no directory {out.parent}")
