"""Ships tuned settings as presets: `nufed run board/heart`, written from the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from board.page import Shown
from board.problems import PROTOCOL
from nufed.lab.board import method_config

FOLDER = Path(__file__).parent.parent / "src/nufed/lab/config/presets/board"
STARTERS = {  # presets of problems to start with: their first line, and their note
    "sinusoid": (
        "What fine-tuning is for: newcomers fit a sine wave of their own from ten samples "
        "(Finn et al. 2017)",
        "Every agent has a sine wave of its own and ten samples to fine-tune on, and the mean of "
        "all waves is close to 0, so that a shared model is of little use without fine-tuning. "
        "Outer samples of Per-FedAvg and gMeta are none of the inner ones. Settings are those of "
        "the board: ten trials for every method with another seed, scored by validation samples of "
        "agents in training. FedAvg with ten local steps costs as much as gMeta (a Hessian-vector "
        "product counted as two gradients).",
    ),
}
STARTED = {  # their methods, and what these are called on the board
    "fedavg": "fedavg-1",
    "per-fedavg": "per-fedavg",
    "gmeta": "gmeta-3",
    "fedavg-10-steps": "fedavg-10",
}


def write(measured: list[Shown], folder: Path = FOLDER) -> list[Path]:
    """A preset for every measured problem, with the methods in their order on the board."""
    measured = [shown for shown in measured if not shown.stage.equal_gradients]
    starters = [_start(shown, folder.parent) for shown in measured if shown.name in STARTERS]
    return [*(_write(shown, folder) for shown in measured), *starters]


def _start(shown: Shown, folder: Path) -> Path:
    """A preset to start with: few methods, with the settings that the board found."""
    about, note = STARTERS[shown.name]
    stage = shown.stage
    tables = {key: table for key, table in stage.tables.items() if key != "tune"}
    more = {"note": note, "seeds": [0], "eval_steps": PROTOCOL.last, "eval_every": 30}
    methods = {}
    for name, on_board in STARTED.items():
        settings = {"algorithm": on_board, **stage.settings_of(on_board)}
        methods[name] = settings | shown.methods[on_board][0]["chosen"]
    path = folder / f"{shown.name}.toml"
    text = tomli_w.dumps({**tables, **more, "methods": methods})
    path.write_text(f"# {about}\n# Written by `make board` from board/results\n{text}", "utf-8")
    return path


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
