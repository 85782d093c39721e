"""Creates a new app directory from the template."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from nufed.errors import InputError

# Python files have the suffix .txt in the template, so that tools do not import them
TEMPLATE = {
    "federation.toml": "federation.toml",
    "my_data.py": "my_data.py.txt",
    "app.py": "app.py.txt",
    "pyproject.toml": "pyproject.toml",
}


def new_app(folder: Path) -> None:
    """Write the files of an app that Flower can run; nothing is overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty: give another directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in TEMPLATE.items():
            text = (files("nufed.flower.ops") / "template" / source).read_text("utf-8")
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise InputError(f"{folder} can't be written ({error.strerror}): give another") from error
