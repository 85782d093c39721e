"""Ships tuned settings as presets: `nufed run board/heart`, written from the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from board.page import Shown
from board.problems import PROTOCOL
from nufed.lab.board import method_config

FOLDER = Path(__file__).parent.parent / "src/nufed/lab/config/presets/board"
SHARED = ("seeds", "eval_steps")


def write(measured: list[Shown], folder: Path = FOLDER) -> list[Path]:
    """A preset for every measured problem, with the methods in their order on the board."""
    return [_write(shown, folder) for shown in measured if not shown.stage.equal_gradients]


def _write(shown: Shown, folder: Path) -> Path:
    stage = shown.stage
    methods: dict[str, Any] = {}
    for name in shown.ranked:
        if name == "pooled":  # all agents in every round: a setting of the run, not of a method
            continue
        chosen = shown.methods[name][0]["chosen"]
        settings = stage.settings_of(name) | chosen
        config = method_config(stage.problem_of(name), name, settings)
        methods[name] = config.methods[name].model_dump(exclude_none=True)
    tables = {
        **{key: table for key, table in stage.tables.items() if key not in ("method", "tune")},
        "seeds": [0],
        "eval_steps": PROTOCOL.last,
        "methods": methods,
    }
    if not stage.higher_is_better or "majority" not in stage.baselines:
        tables["baselines"] = ["untrained"]
    folds = len(shown.stages) > 1
    newcomer = f" The newcomer is {stage.tables['data']['unseen'][0]}." if folds else ""
    text = (
        f"# Tuned by the board, {PROTOCOL.trials} trials per method: {stage.about['title']}\n"
        f"# Written by `make board` from board/results/{stage.name}.json; methods in the order of "
        f"docs/board.md.{newcomer}\n"
        "# All methods take minutes; some of them: --methods ditto,fedrep\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{shown.name}.toml"
    path.write_text(f"{text}{tomli_w.dumps(tables)}", "utf-8")
    return path
