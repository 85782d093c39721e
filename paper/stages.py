"""The stages of `make paper` and their order.

`fig1` to `fig4` are the paper's figures in the paper's protocol, as shipped with nufed: one step
size α of fine-tuning for all methods, 800 samples to train on and 200 to test on. All other stages
keep the same 800 samples for training and cut the 200 into 50 for validation and 150 for test, so
that every method's α at evaluation can be chosen on validation samples. They use the seeds of the
figures, hence the same splits and batches; most have fewer seeds and rounds.
"""

import copy
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from paper import tuning

ROUNDS, SEEDS = 200, [0, 1, 2]  # of the extensions
UNSEEN = 10  # of 50 agents, in the extensions
ALPHAS = [0.01, 0.05, 0.1, 0.5, 1.0, math.inf]
NUS = [0, 1, 2, 3, 5, 10]
DELTAS = ["1e-2", "1e-3", "1e-4", "1e-5", "1e-6", "1e-7"]
TUNED_AT = 0.1  # α_d of the stages with tuned step sizes
PARTS = {"validation": 0.05, "test": 0.15}  # of an agent's samples; the rest is as in the paper
FOUR: dict[str, dict[str, Any]] = {
    "fedavg": {"algorithm": "fedavg"},
    "per-fedavg-fo": {"algorithm": "per_fedavg", "curvature": "first_order"},
    "gmeta-fo": {"algorithm": "gmeta", "curvature": "first_order"},
    "gmeta-exact": {"algorithm": "gmeta", "curvature": "exact"},
}

Tables = dict[str, Any]


@dataclass
class Where:
    """Output paths, and a hook that shrinks every stage; the tests override both."""

    runs: Path = Path("runs/paper")  # run directories, large
    results: Path = Path("docs/results")  # summaries and figures, small
    page: Path = Path("docs/results.md")
    shrink: Callable[[Tables], Tables] = lambda tables: tables


WHERE = Where()


@dataclass(frozen=True)
class Stage:
    """A run: a description, and its configuration (built when it is run).

    A stage that is a search (``tuning``) makes several runs, until the best step sizes lie inside
    the grid.
    """

    about: str
    config: Callable[[], Tables]
    search: bool = False


def preset(name: str) -> Tables:
    return tomllib.loads(
        (files("nufed.lab.config") / "presets" / f"{name}.toml").read_text("utf-8")
    )


def changed(tables: Tables, **changes: Any) -> Tables:
    """The same tables with other values; of ``data`` only the keys given."""
    for key, value in changes.items():
        own = tables.get(key)
        tables = tables | {key: own | value if isinstance(own, Mapping) else value}
    return tables


def fair(figure: str, methods: Tables, **changes: Any) -> Tables:
    """A figure with all its seeds and rounds, every method's α chosen at every evaluation."""
    tables = changed(preset(figure), eval_lr="chosen_by_round", eval_every=20, data=PARTS)
    return changed(tables, **changes) | {"methods": copy.deepcopy(methods)}


def shorter(methods: Tables | None = None, **changes: Any) -> Tables:
    """Figure 1 with four methods, fewer seeds and fewer rounds; ``changes`` to its tables."""
    tables = changed(preset("fig1"), seeds=SEEDS, rounds=ROUNDS, eval_every=50, data=PARTS)
    return changed(tables, **changes) | {"methods": copy.deepcopy(methods or FOUR)}


def spread_like(alpha: float) -> Tables:
    """``[data]`` with that α_d and agents held out; infinite is IID."""
    way = {"partition": "iid"} if math.isinf(alpha) else {"dirichlet": alpha}
    return {**way, "unseen_agents": UNSEEN}


WRITERS = {
    "participation": 0.02,
    "eval_agents": 100,
    "data": {
        "source": "mnist-writers",
        "partition": "given",
        "samples_per_agent": None,
        "small_agents": "use_all",
        "unseen_agents": 100,
        "validation": 0.1,
        "test": 0.2,
    },
}
HETEROGENEOUS = {"data": spread_like(TUNED_AT)}


def trials(**changes: Any) -> Tables:
    """Short trainings of one seed, scored on validation samples; the search adds methods."""
    return shorter(
        {},
        **changed(changes, seeds=[0], rounds=100, eval_on="validation", baselines=["majority"]),
    )


def tuned(search: str, **changes: Any) -> Tables:
    """The four methods, and training alone, each with its best step sizes."""
    methods = {name: own | tuning.chosen(search, name) for name, own in FOUR.items()}
    return shorter(methods, tune_local=True, **changes)


def by_steps(how: str, step_sizes: Tables, **changes: Any) -> Tables:
    own = {"algorithm": "gmeta", "curvature": how, **step_sizes}
    methods = {f"nu-{nu}": {**own, "adapt_steps": nu} for nu in NUS}
    nulls = ["majority", "untrained"]
    return shorter(methods, eval_steps=max(NUS), baselines=nulls, **changes)


def deltas() -> Tables:
    hf = {"algorithm": "gmeta", "curvature": "hessian_free"}
    methods = {
        "exact": {"algorithm": "gmeta", "curvature": "exact"},
        "hf-auto": hf,
        **{f"hf-{delta}": {**hf, "fd_step": float(delta)} for delta in DELTAS},
    }
    parts = {"validation": 0.0, "test": 0.2}  # as in the paper: nothing is chosen here
    return shorter(methods, seeds=[0, 1], eval_every=20, baselines=["majority"], data=parts)


def alpha_stage(alpha: float) -> tuple[str, Stage]:
    """The name of a stage and the stage: the four methods with that α_d."""
    about = f"α_d = {alpha:g}, agents held out"
    return f"alpha-{alpha:g}", Stage(about, lambda: shorter(data=spread_like(alpha)))


def beside(**data: Any) -> Callable[[], Tables]:
    """Figure 1 with another choice about data that the paper does not specify."""
    return lambda: shorter(data=data, baselines=["majority", "untrained"])


def large_batches() -> Tables:
    """Three methods with D = 120, after three fine-tuning steps and after one."""
    methods = {
        f"{name}-120": {**FOUR[name], "batch_size": 120, "eval_steps": [3, 1]}
        for name in ("fedavg", "per-fedavg-fo", "gmeta-fo")
    }
    return fair("fig1", methods, eval_every=100, baselines=["majority", "untrained"])


STAGES: dict[str, Stage] = {
    "fig1": Stage("Figure 1, the paper's protocol", lambda: preset("fig1")),
    "fig2": Stage("Figure 2, the paper's protocol", lambda: preset("fig2")),
    "fig3": Stage("Figure 3, the paper's protocol", lambda: preset("fig3")),
    "fig4": Stage("Figure 4, the paper's protocol", lambda: preset("fig4")),
    "delta": Stage("steps of finite differences", deltas),
    "fair-standardised": Stage(
        "Figure 1, standardised inputs, α chosen",
        lambda: fair(
            "fig1",
            FOUR,
            baselines=["majority", "untrained"],
            data={"args": {"pixels": "standardised"}},
        ),
    ),
    "tuning": Stage("step sizes tried on validation data", lambda: trials(**HETEROGENEOUS), True),
    "tuned": Stage("the best step sizes of every method", lambda: tuned("tuning", **HETEROGENEOUS)),
    "steps-tuned": Stage(
        "ν in training × ν in evaluation, tuned step sizes, α chosen",
        lambda: by_steps("first_order", tuning.chosen("tuning", "gmeta-fo"), **HETEROGENEOUS),
    ),
    "fair-fig1": Stage("Figure 1, α chosen", lambda: fair("fig1", FOUR)),
    "fair-fig2": Stage("Figure 2, α chosen", lambda: fair("fig2", FOUR)),
    "writers-tuning": Stage("the same search on MNIST by writer", lambda: trials(**WRITERS), True),
    "writers": Stage(
        "one agent per writer of MNIST, tuned there", lambda: tuned("writers-tuning", **WRITERS)
    ),
    "fair-batch": Stage("Figures 3 and 4: D = 120, α chosen", large_batches),
    "steps": Stage(
        "ν in training × ν in evaluation, the paper's setting, α chosen",
        lambda: by_steps("exact", {}),
    ),
    **dict(map(alpha_stage, ALPHAS)),
    "pixels-symmetric": Stage("inputs in −1 … 1", beside(args={"pixels": "symmetric"})),
    "reuse": Stage("agents may share samples", beside(reuse="across_agents")),
}
