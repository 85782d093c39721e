"""A new app directory for a federation, to be filled in."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from nufed.errors import InputError

# Python files have another ending there, as tools that look at nufed's own must not import them
TEMPLATE = {
    "federation.toml": "federation.toml",
    "my_data.py": "my_data.py.txt",
    "app.py": "app.py.txt",
    "pyproject.toml": "pyproject.toml",
}


def new_app(folder: Path) -> None:
    """Write the files of an app that Flower can run; nothing that is there is overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty: give another directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in TEMPLATE.items():
            text = (files("nufed.federate") / "template" / source).read_text("utf-8")
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise InputError(f"{folder} can't be written ({error.strerror}): give another") from error
