"""The records of the campaign: one small file per stage with every method's trials and scores.

``board/results/STAGE.json`` holds finished methods and is committed. A method that is under way has
``runs/board/STAGE/METHOD.jsonl``: a line for each finished training, so that a kill loses none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from board.problems import VERSION, WHERE, Stage
from nufed.errors import RunError
from nufed.lab.files import locked, write_durably

Record: TypeAlias = dict[str, Any]


def read(stage: str) -> dict[str, Record]:
    """The finished methods and baselines of a stage."""
    path = WHERE.results / f"{stage}.json"
    if not path.exists():
        return {}
    content = json.loads(path.read_text("utf-8"))
    if content["protocol"] != VERSION:
        raise RunError(
            f"{path} is of version {content['protocol']} of the protocol, and this is {VERSION}: "
            "move the results of the old version away"
        )
    methods: dict[str, Record] = content["methods"]
    return methods


def write(stage: str, method: str, record: Record) -> None:
    """Add or replace a method's record; other processes may do the same."""
    WHERE.results.mkdir(parents=True, exist_ok=True)
    WHERE.runs.mkdir(parents=True, exist_ok=True)
    with locked(WHERE.runs, f"{stage}.lock", wait=60):
        methods = read(stage) | {method: record}
        content = {"protocol": VERSION, "stage": stage, "methods": dict(sorted(methods.items()))}
        lines = json.dumps(content, ensure_ascii=False, indent=0, separators=(",", ":"))
        write_durably(WHERE.results / f"{stage}.json", f"{lines}\n".encode())


class Underway:
    """The trainings of a method that are done so far."""

    def __init__(self, stage: Stage, method: str) -> None:
        self.path = WHERE.runs / stage.name / f"{method}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = [] if not self.path.exists() else list(_whole_lines(self.path))
        digest = stage.digest(method)
        if not self._lines or self._lines[0] != {"digest": digest}:  # of other settings
            self._lines = []
            self.path.write_text("", "utf-8")
            self.add({"digest": digest})

    def add(self, line: Record) -> None:
        """Record a training."""
        self._lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def known(self, kind: str) -> list[Record]:
        """The records of one kind."""
        return [line[kind] for line in self._lines if kind in line]


def _whole_lines(path: Path) -> Iterator[Record]:
    """The lines of a file, but for one that a kill cut off."""
    for line in path.read_text("utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


@contextmanager
def claimed(stage: Stage, method: str) -> Iterator[bool]:
    """Whether this process may work on a method; another one may be at it."""
    folder = WHERE.runs / stage.name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder, f"{method}.lock"):
            yield True
    except RunError:
        yield False
