"""Imports the federation of an app directory."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from nufed.errors import InputError
from nufed.flower.app.apps import App


def load_app(folder: Path) -> App:
    """The federation defined in a directory's app.py."""
    if not (folder / "app.py").is_file():
        raise InputError(f"{folder} is not an app directory: it has no app.py")
    sys.path.insert(0, str(folder.resolve()))
    try:
        found = importlib.import_module("app").federation
    except Exception as error:  # any error in the user's files
        raise InputError(
            f"{folder / 'app.py'} can't be imported ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(found, App):
        raise InputError(f"{folder / 'app.py'}: `federation` must be a nufed.flower.App")
    return found
