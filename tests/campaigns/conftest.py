"""Campaigns: one kind of fault, repeated with random variations.

Each has a short version in the default run and a full one marked slow. What it did is one line,
shown by `pytest -s` and added to the file that NUFED_CAMPAIGNS names.
"""

import os
from pathlib import Path

import pytest


@pytest.fixture
def tell():
    def say(line):
        print(line)
        if path := os.environ.get("NUFED_CAMPAIGNS"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    return say
