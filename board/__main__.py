"""Runs the stages of `make board`, one after another, and writes docs/board.md.

    python -m board                  all stages that are not done yet, then the page
    python -m board sensors heart    only these (heart: all its folds)
    python -m board --part 1/2       as one of two processes that share the work
    python -m board --plan           the predicted cost of every stage, from short measurements
    python -m board --quick          tiny versions of all stages, in a temporary directory
    python -m board --page           only the page
    python -m board --advice         only the check of `nufed advise CONFIG` on what is measured

A finished method is in board/results and is not trained again; an interrupted one is resumed. To
repeat one, remove it there.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from board import advice, campaign, page, plan, presets
from board.problems import ORDER, WHERE, Stage, stages
from nufed.errors import NufedError
from nufed.lab.config.devices import torch_threads


def main(arguments: Sequence[str]) -> None:
    part, flags, names = (1, 1), set[str](), list[str]()
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--part":
            part = part_of(rest.pop(0) if rest else "")
        elif argument in ("--plan", "--quick", "--page", "--advice"):
            flags.add(argument)
        elif argument in ORDER or any(argument == stage.name for stage in stages()):
            names.append(argument)
        else:
            sys.exit(f"board: {argument!r} is not a stage: use some of {', '.join(ORDER)}")
    if "--quick" in flags:
        with tempfile.TemporaryDirectory() as folder:
            quick(Path(folder), names, part)
        return
    wanted = chosen(stages(), names)
    if "--plan" in flags:
        plan.show(wanted, print)
        return
    if "--advice" in flags:
        with torch_threads(1):
            advice.write(say=say)
        return
    if "--page" not in flags:
        campaign.run(wanted, part, say)
    presets.write(page.write())
    print(WHERE.page)


def chosen(every: Sequence[Stage], names: Sequence[str]) -> list[Stage]:
    """The stages of these names, which may be those of all folds of a problem; all by default."""
    if not names:
        return list(every)
    return [s for s in every if s.name in names or (s.name != s.problem and s.problem in names)]


def part_of(text: str) -> tuple[int, int]:
    """``"1/2"`` as two numbers."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    k, n = map(int, found.groups()) if found else (0, 0)
    if not 1 <= k <= n:
        sys.exit(f"board: --part {text!r}: must be K/N with K from 1 to N, for example 1/2")
    return k, n


def quick(folder: Path, names: Sequence[str] = (), part: tuple[int, int] = (1, 1)) -> None:
    """Run tiny versions of the stages into a folder."""
    before = dict(vars(WHERE))
    vars(WHERE).update(runs=folder / "runs", results=folder / "results", page=folder / "board.md")
    try:
        tiny = stages(quick=True)
        campaign.run(chosen(tiny, names), part, say)
        presets.write(page.write(tiny), folder / "presets")
    finally:
        vars(WHERE).update(before)


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except NufedError as error:
        sys.exit(f"board: {error}")
    except KeyboardInterrupt:
        sys.exit("board: stopped; the same command resumes")
