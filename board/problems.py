"""The problems and methods of the board, and the stages of the campaign in their order.

A stage is a problem, one of its folds, or a problem at equal gradients. Those that tell most per
cost come first, so that a campaign that is cut short answers most.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nufed.lab.board import PROTOCOL, Protocol
from nufed.lab.files import canonical, sha256

VERSION = 1  # of the protocol: raised by any change after a look at test scores
HERE = Path(__file__).parent
ORDER = (
    "omniglot-20",
    "sensors",
    "heart",
    "permuted-digits",
    "omniglot-20-gradients",
    "sensors-gradients",
    "sinusoid",
    "omniglot-5",
    "writers",
    "iid-digits",
    "cifar-10",
    "shakespeare",
)
REFERENCE = "gmeta-3"  # whose gradients all methods spend at equal gradients
ONE = "-hvp1"  # ends the name of a method whose Hessian-vector products count as one gradient each
SERVER = ("server_optimizer", "optimizer_")  # keys that methods with an own server do not take
QUICK_METHODS = ("fedavg-5", "gmeta-3", "ditto")
QUICK = Protocol(trials=2, seeds=(0, 1), more_seeds=(2,), steps=(0, 1, 2), local_steps=3)


@dataclass
class Where:
    """Output paths; tests override them."""

    runs: Path = Path("runs/board")  # trainings of methods that are not finished
    results: Path = Path("board/results")  # finished ones, small and committed
    page: Path = Path("docs/board.md")
    evidence: Path = Path("docs/results/nu-board.json")  # for docs/when_nu_pays.md


WHERE = Where()


@dataclass(frozen=True)
class Stage:
    """A problem that methods are searched and scored on.

    Args:
        name: of the stage and its records.
        problem: of the board; several stages are one problem with folds.
        tables: the configuration, without methods.
        about: ``[board]`` of the problem's file.
        methods: by name: its settings, and what is said of it in ``methods.toml``.
        equal_gradients: whether rounds are scaled so that all methods spend the same gradients.
        protocol: its numbers.
    """

    name: str
    problem: str
    tables: Mapping[str, Any]
    about: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]]
    equal_gradients: bool = False
    protocol: Protocol = field(default=PROTOCOL)

    def problem_of(self, method: str) -> dict[str, Any]:
        """The tables of the problem for a method."""
        tables = dict(copy.deepcopy(self.tables))
        if self.methods[method].get("own_server"):
            shared = tables["method"].items()
            tables["method"] = {k: v for k, v in shared if not k.startswith(SERVER)}
        return tables

    def settings_of(self, method: str) -> dict[str, Any]:
        """What is set of a method, beside what is shared and searched."""
        own = self.methods[method]
        return {k: v for k, v in own.items() if k not in ("own_server", "search", "exact", "needs")}

    def ranges_of(self, method: str) -> dict[str, list[Any]]:
        """The ranges that the problem and the method give."""
        ranges = {**self.tables["tune"]["ranges"], **self.methods[method].get("search", {})}
        if self.methods[method].get("own_server"):
            ranges.pop("optimizer_lr", None)
        return ranges

    def digest(self, method: str) -> str:
        """Of everything that determines a method's records, but the code."""
        numbers = {
            name: list(v) if isinstance(v, tuple) else v for name, v in vars(self.protocol).items()
        }
        parts = [VERSION, self.problem_of(method), self.settings_of(method), self.ranges_of(method)]
        return sha256(canonical([*parts, self.equal_gradients, numbers]))[:16]

    @property
    def higher_is_better(self) -> bool:
        return bool(self.about.get("better", "higher") == "higher")

    @property
    def baselines(self) -> list[str]:
        """The baselines that are no methods; not repeated at equal gradients."""
        named = self.about.get("baselines", [])
        return [] if self.equal_gradients else [name for name in named if name != "pooled"]


def read_methods() -> dict[str, dict[str, Any]]:
    """``methods.toml``."""
    return tomllib.loads((HERE / "methods.toml").read_text("utf-8"))


def stages(quick: bool = False) -> list[Stage]:
    """All stages in their order; ``quick``: tiny ones, with few methods."""
    methods = read_methods()
    if quick:
        methods = {name: methods[name] for name in QUICK_METHODS}
    found = []
    for name in ORDER:
        problem = name.removesuffix("-gradients")
        tables = tomllib.loads((HERE / "problems" / f"{problem}.toml").read_text("utf-8"))
        about = tables.pop("board")
        if quick:
            tables, about = _shrunk(tables, about)
        stage = Stage(name, problem, tables, about, _methods(methods, about))
        if quick:
            stage = replace(stage, protocol=QUICK)
        if name != problem:
            own = {k: v for k, v in stage.methods.items() if k != "pooled"}
            more = {k + ONE: v for k, v in own.items() if v.get("exact")}
            stage = replace(stage, methods=own | more, equal_gradients=True)
        found += _folds(stage)
    return found


def _methods(methods: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """The methods on a problem: all, and pooled training where it makes sense."""
    pooled = {"algorithm": "fedavg", "local_steps": 1, "participation": 1.0}
    more = {"pooled": pooled} if "pooled" in about.get("baselines", []) else {}
    return {name: {"algorithm": name, **own} for name, own in methods.items()} | more


def _folds(stage: Stage) -> list[Stage]:
    """A stage for each agent that is the newcomer in turn, if the problem is so."""
    folds = stage.about.get("folds")
    if not folds:
        return [stage]
    return [
        replace(
            stage,
            name=f"{stage.name}-{fold}",
            tables={**stage.tables, "data": {**stage.tables["data"], "unseen": [fold]}},
        )
        for fold in folds
    ]


def _shrunk(tables: dict[str, Any], about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tiny version of a problem."""
    data = dict(tables["data"])
    args = dict(data.get("args", {}))
    for key, least in (("agents", 12), ("tasks", 1)):
        if key in args:
            args[key] = least if data["source"] != "digit-tasks" else 12
    if args:
        data["args"] = args
    if "unseen_agents" in data:
        data["unseen_agents"] = 4
    if data["source"] in ("digits", "cifar10"):
        data["agents"] = 12
    about = {**about, "folds": about["folds"][:1]} if "folds" in about else about
    return {**tables, "rounds": 2, "eval_agents": 3, "data": data}, about
