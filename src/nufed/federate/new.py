"""A new app directory for a federation, to be filled in."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from nufed.errors import InputError

TEMPLATE = ("federation.toml", "my_data.py", "app.py", "pyproject.toml")


def new_app(folder: Path) -> None:
    """Write the files of an app that Flower can run; nothing that is there is overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty: give another directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in TEMPLATE:
            text = (files("nufed.federate") / "template" / name).read_text("utf-8")
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise InputError(f"{folder} can't be written ({error.strerror}): give another") from error
