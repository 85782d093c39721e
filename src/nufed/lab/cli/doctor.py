"""Checks this machine's environment: findings, problems and how to fix them."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch

from nufed.lab.readers.sources import STORED, data_directory
from nufed.server.rounds import GIB, available_memory
from nufed.simulation import start_method, usable_cores

State: TypeAlias = Literal["ok", "note", "problem"]

MIN_PYTHON, MIN_TORCH = (3, 11), (2, 10)
MIN_MEMORY, MIN_DISK = 2.0, 1.0  # GiB


class Finding(NamedTuple):
    """The result of one check, with advice if something is wrong."""

    name: str
    state: State
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Check Python, torch, processes, memory, disk and data."""
    return [
        _python(),
        _torch(),
        _processes(),
        *_memory(),
        _runs_directory(),
        *(_data_set(name) for name in STORED),
    ]


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info >= MIN_PYTHON:
        return Finding("Python", "ok", version)
    minimum = ".".join(map(str, MIN_PYTHON))
    return Finding("Python", "problem", version, f"install Python {minimum} or newer")


def _torch() -> Finding:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    result = f"{torch.__version__}, {torch.get_num_threads()} threads; runs use `threads` of them"
    if version >= MIN_TORCH:
        return Finding("torch", "ok", result)
    minimum = ".".join(map(str, MIN_TORCH))
    return Finding("torch", "problem", result, f"install torch {minimum} or newer")


def _processes() -> Finding:
    result = f"{usable_cores()} cores, all used by default (workers), by {start_method()}"
    return Finding("processes", "ok", result)


def _memory() -> Iterator[Finding]:
    """Available memory, where the system reports it."""
    available = available_memory()
    if available is None:
        return
    free = available / GIB
    result = f"{free:.1f} GiB free"
    if free >= MIN_MEMORY:
        yield Finding("memory", "ok", result)
    else:
        advice = f"free some: the paper's runs need about {MIN_MEMORY:g} GiB; or set workers=1"
        yield Finding("memory", "problem", result, advice)


def _runs_directory() -> Finding:
    here = Path.cwd()
    free = shutil.disk_usage(here).free / 2**30
    result = f"{free:.1f} GiB free in {here}"
    try:
        with tempfile.TemporaryFile(dir=here):
            pass
    except OSError as error:
        advice = "change to a writable directory, or give --out"
        return Finding("disk", "problem", f"{here} can't be written ({error.strerror})", advice)
    if free >= MIN_DISK:
        return Finding("disk", "ok", result)
    return Finding("disk", "problem", result, "free some space, or give --out on another disk")


def _data_set(name: str) -> Finding:
    stored = STORED[name]
    where = data_directory()
    if stored.missing():
        return Finding(name, "note", f"not in {where}", f"if you need it: {stored.command}")
    unreadable = [file for file in stored.files if not os.access(where / file, os.R_OK)]
    if unreadable:
        return Finding(
            name, "problem", f"{where / unreadable[0]} can't be read", "make it readable"
        )
    if not stored.complete():
        advice = f"remove the damaged files and run: nufed data get {name}"
        return Finding(name, "problem", f"files in {where} are damaged", advice)
    return Finding(name, "ok", str(where))
