"""The stages of `make paper`: what is trained, in which order.

Stages 1 to 4 are the paper's figures, as shipped with nufed; the others change one thing each. They
use the seeds of the figures, hence the same splits and batches, but fewer of them and fewer rounds.
"""

import copy
import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

RUNS = Path("runs/paper")  # run directories, large
RESULTS = Path("docs/results")  # summaries and figures, small
ROUNDS, SEEDS = 200, [0, 1, 2]  # beyond the paper
UNSEEN = 10  # of 50 agents, beyond the paper
ALPHAS = [0.01, 0.05, 0.1, 0.5, 1.0, math.inf]
NUS = [0, 1, 2, 3, 5, 10]
DELTAS = ["1e-2", "1e-3", "1e-4", "1e-5", "1e-6", "1e-7"]
TUNED_AT = 0.1  # α_d of the stages with tuned step sizes
GRID = {"adapt_lr": [0.003, 0.01, 0.03, 0.1], "meta_lr": [0.001, 0.01, 0.1]}
FOUR: dict[str, dict[str, Any]] = {
    "fedavg": {"algorithm": "fedavg"},
    "per-fedavg-fo": {"algorithm": "per_fedavg", "curvature": "first_order"},
    "gmeta-fo": {"curvature": "first_order"},
    "gmeta-exact": {"curvature": "exact"},
}

Tables = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A run: what it is for, and its configuration (made when its turn comes)."""

    about: str
    config: Callable[[], Tables]


def preset(name: str) -> Tables:
    return tomllib.loads((files("nufed.runs") / "presets" / f"{name}.toml").read_text("utf-8"))


def shorter(**changes: Any) -> Tables:
    """Figure 1 with four methods, fewer seeds and fewer rounds; ``changes`` to its tables."""
    tables = preset("fig1") | {"seeds": SEEDS, "rounds": ROUNDS, "methods": copy.deepcopy(FOUR)}
    for key, value in changes.items():
        tables[key] = tables[key] | value if isinstance(tables.get(key), dict) else value
    return tables


def spread_like(alpha: float) -> Tables:
    """``[data]`` with that α_d and agents held out; infinite is IID."""
    way = {"partition": "iid"} if math.isinf(alpha) else {"dirichlet": alpha}
    return {**way, "unseen_agents": UNSEEN}


def tuning() -> Tables:
    """Every method with every pair of step sizes, scored on validation data."""
    methods = {
        f"{name}_{a}_{b}": {**own, "adapt_lr": a, "meta_lr": b}
        for name, own in FOUR.items()
        for a in GRID["adapt_lr"]
        for b in GRID["meta_lr"]
    }
    tables = shorter(
        seeds=[0],
        rounds=100,
        eval_every=50,
        eval_on="validation",
        baselines=["majority"],
        data=spread_like(TUNED_AT) | {"validation": 0.1},
    )
    return tables | {"methods": methods}


def tuned_methods() -> Tables:
    """The four methods, each with the step sizes that were best on validation data."""
    chosen = json.loads((RESULTS / "tuning.json").read_text("utf-8"))["chosen"]
    return {n: {**own, **{key: chosen[n][key] for key in GRID}} for n, own in FOUR.items()}


def by_steps(how: str, step_sizes: Tables) -> Tables:
    return {f"nu-{nu}": {"adapt_steps": nu, "curvature": how, **step_sizes} for nu in NUS}


def tuned_step_sizes() -> Tables:
    own = tuned_methods()["gmeta-fo"]
    return {key: own[key] for key in GRID}


def writers(methods: Tables) -> Tables:
    return shorter(
        participation=0.02,
        eval_every=20,
        eval_agents=100,
        data={
            "source": "mnist-writers",
            "partition": "given",
            "samples_per_agent": None,
            "small_agents": "use_all",
            "unseen_agents": 100,
        },
    ) | {"methods": methods}


def deltas() -> Tables:
    hessian_free = {
        f"hf-{delta}": {"curvature": "hessian_free", "fd_step": float(delta)} for delta in DELTAS
    }
    methods = {
        "exact": {"curvature": "exact"},
        "hf-auto": {"curvature": "hessian_free"},
        **hessian_free,
    }
    tables = shorter(seeds=[0, 1], eval_every=20, baselines=["majority"])
    return tables | {"methods": methods}


def longer(method: str, rounds: int) -> Tables:
    tables = shorter(rounds=rounds, eval_every=rounds // 40, baselines=["majority", "untrained"])
    return tables | {"methods": {method: FOUR[method]}}


def heat(how: str, **changes: Any) -> Tables:
    sizes = changes.pop("sizes", {})
    nulls = ["majority", "untrained"]
    tables = shorter(eval_steps=max(NUS), eval_every=50, baselines=nulls, **changes)
    return tables | {"methods": by_steps(how, sizes)}


def alpha_stage(alpha: float) -> tuple[str, Stage]:
    """The name of a stage and the stage: the four methods with that α_d."""
    about = f"α_d = {alpha:g}, agents held out"
    return f"alpha-{alpha:g}", Stage(about, lambda: shorter(data=spread_like(alpha)))


def beside(**data: Any) -> Callable[[], Tables]:
    """Figure 1 with another choice about the data that the paper leaves open."""
    return lambda: shorter(data=data, baselines=["majority", "untrained"])


def standardised() -> Tables:
    """Figure 1 with four methods and standardised inputs, all else as it is."""
    tables = shorter(data={"args": {"pixels": "standardised"}}, baselines=["majority", "untrained"])
    return tables | {key: preset("fig1")[key] for key in ("seeds", "rounds")}


STAGES: dict[str, Stage] = {
    "fig1": Stage("Figure 1", lambda: preset("fig1")),
    "fig2": Stage("Figure 2", lambda: preset("fig2")),
    "fig3": Stage("Figure 3", lambda: preset("fig3")),
    "fig4": Stage("Figure 4", lambda: preset("fig4")),
    "delta": Stage("steps of finite differences", deltas),
    "pixels-symmetric": Stage("inputs in −1 … 1", beside(args={"pixels": "symmetric"})),
    "pixels-standardised": Stage("standardised inputs", beside(args={"pixels": "standardised"})),
    "fig1-standardised": Stage("Figure 1, standardised inputs", standardised),
    "reuse": Stage("agents may share samples", beside(reuse="across_agents")),
    "tuning": Stage("step sizes tried on validation data", tuning),
    "tuned": Stage(
        "the best step sizes of every method",
        lambda: shorter(data=spread_like(TUNED_AT)) | {"methods": tuned_methods()},
    ),
    "steps": Stage("ν in training × ν in evaluation, the paper's setting", lambda: heat("exact")),
    "steps-tuned": Stage(
        "ν in training × ν in evaluation, tuned step sizes",
        lambda: heat("first_order", data=spread_like(TUNED_AT), sizes=tuned_step_sizes()),
    ),
    **dict(map(alpha_stage, ALPHAS)),
    "compute-fedavg": Stage("FedAvg, four times the rounds", lambda: longer("fedavg", 1600)),
    "compute-per-fedavg": Stage(
        "Per-FedAvg, twice the rounds", lambda: longer("per-fedavg-fo", 800)
    ),
    "writers": Stage("one agent per writer of MNIST", lambda: writers(FOUR)),
    "writers-tuned": Stage("the same, tuned step sizes", lambda: writers(tuned_methods())),
}
