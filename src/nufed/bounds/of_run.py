"""Bounds for a finished run: constants estimated on its data, predictions beside measurements."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from nufed.aggregate import Mean
from nufed.algorithms import GMeta
from nufed.bounds.promise import Kind, promise, table_by_steps
from nufed.data import Split
from nufed.errors import InputError, NumericalWarning, RunError
from nufed.estimate import Estimate, Estimator, spread
from nufed.metagrad import Exact, FirstOrder, HessianFree
from nufed.runs import Run
from nufed.runs.build import (
    build_federation,
    build_loss,
    build_module,
    build_objective,
    build_samples,
)
from nufed.runs.part import read_server
from nufed.runs.schema import OWN
from nufed.runs.trust import require_trust
from nufed.server import choose_cohort
from nufed.theory import BatchSizes, ProblemConstants, Training


def bounds_of_run(run: Run, *, trust: bool = False) -> dict[str, Any]:
    """Estimates, bounds and measurements for a finished run (its first seed).

    ``trust`` allows importing the functions that the run names, if it names any.
    """
    require_trust(run.path, run.config, trust)
    seed = run.config.seeds[0]
    trained = [name for name, part in run.methods.items() if seed in part]
    algorithms = {n: a for n, a in run.config.algorithms().items() if n in trained}
    methods = {n: a for n, a in algorithms.items() if isinstance(a, GMeta)}
    if not methods:
        raise InputError(f"{run.path} has no method that the paper's bounds are about")
    learned = [n for n, a in methods.items() if a.rates_lr]
    if learned:
        raise InputError(
            f"{run.path} learns the step sizes of {', '.join(learned)} (rates_lr), and the paper's "
            "bounds are about one step size that stays; ask for bounds of a run without them"
        )
    estimator = _estimator(run, seed)
    models = {name: _models(run, name, seed, estimator) for name in methods}
    ends = [w for saved in models.values() for w in (saved[0][1], saved[-1][1])]
    smooth = estimator.is_smooth(ends[0])
    estimates = _estimates(estimator, _distinct(ends), smooth)
    constants = _constants(estimates)
    shared = run.config.method
    most = max(a.adapt_steps for a in methods.values()) if smooth else -1
    fd_step = max(_fd_step(a) for a in methods.values())
    return {
        "constants": {n: None if e is None else asdict(e) for n, e in estimates.items()},
        "smooth": smooth,
        "seed": seed,
        "by_steps": table_by_steps(
            constants, shared.adapt_lr, shared.batch_size, shared.local_steps, fd_step, most
        ),
        "uniform": all(a.aggregation == Mean() for a in methods.values()),
        "methods": [
            {
                **_predicted(run, name, algorithm, constants, smooth, estimator),
                "measured": _measured(estimator, models[name][-1][1], algorithm),
            }
            for name, algorithm in methods.items()
        ],
        "stationarity": [
            {"method": name, "round": round, "value": _stationarity(estimator, w, algorithm)}
            for name, algorithm in methods.items()
            for round, w in models[name]
        ],
    }


def _predicted(
    run: Run,
    name: str,
    algorithm: GMeta,
    constants: ProblemConstants,
    smooth: bool,
    estimator: Estimator,
) -> dict[str, Any]:
    """What the theory says about a method: with kinks, nothing."""
    if not smooth:
        return {"method": name, "steps": algorithm.adapt_steps}
    agents = estimator.federation.split.seen
    cohort = choose_cohort(agents, run.config.participation, seed=0, round=0)
    training = Training(
        algorithm.meta_lr, algorithm.local_steps, run.config.rounds, len(cohort), len(agents)
    )
    return promise(
        name,
        constants,
        _kind(algorithm),
        float(algorithm.adapt_lr),
        BatchSizes.equal(algorithm.batch_size, algorithm.adapt_steps),
        _fd_step(algorithm),
        training,
        # F(w₀), which is F(w₀) − F* or more for losses that are never negative
        estimator.meta_value(estimator.objective.initial(), algorithm),
    )


def _measured(estimator: Estimator, w: Tensor, algorithm: GMeta) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # a poor fd_step shows in the numbers
        measured = estimator.measure(w, algorithm)
    apart = spread(estimator.meta_gradients(w, algorithm))
    return {"bias": measured.bias, "error": measured.error, "dissimilarity": apart}


def _stationarity(estimator: Estimator, w: Tensor, algorithm: GMeta) -> float:
    """‖∇F(w)‖², over all agents that train."""
    return float(estimator.meta_gradients(w, algorithm).mean(dim=0).square().sum())


def _estimator(run: Run, seed: int) -> Estimator:
    """The run's problem, made again from its configuration and checked against its split."""
    config = run.config
    if OWN in (config.data.source, config.model.name, config.loss):
        raise InputError(
            f"{run.path} was run from Python with a model, data or loss of its own, which can't be "
            "made again here; use nufed.estimate.Estimator there"
        )
    samples = build_samples(config.data)
    federation = build_federation(config, samples, seed)
    saved = Split.load(run.path / "splits" / f"seed-{seed}.safetensors")
    if saved.fingerprint != federation.split.fingerprint:
        raise RunError(
            f"{run.path}: the data gives another split today than when it was run; bounds can only "
            "be estimated on the same data"
        )
    module = build_module(config, samples, seed)
    return Estimator(build_objective(config, module, build_loss(config, samples)), federation, seed)


def _models(run: Run, name: str, seed: int, estimator: Estimator) -> list[tuple[int, Tensor]]:
    """The saved models of a method by round: the initial, those in between, and the final one."""
    folder = run.path / "methods" / name / f"seed-{seed}"
    size = estimator.objective.size
    found = [(0, estimator.objective.initial())]
    found += [
        (int(number), read_server(path, size)["model"].double())
        for path in sorted(folder.glob("model-round-*.safetensors"))
        if (number := path.stem.removeprefix("model-round-")).isdecimal()
    ]
    final = read_server(folder / "model.safetensors", size)["model"].double()
    return [*(f for f in found if f[0] < run.config.rounds), (run.config.rounds, final)]


def _distinct(models: list[Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []
    for w in models:
        if not any(torch.equal(w, k) for k in kept):
            kept.append(w)
    return kept


def _estimates(
    estimator: Estimator, models: list[Tensor], smooth: bool
) -> dict[str, Estimate | None]:
    few = [models[0], models[-1]]  # curvature is costly: only at the start and at an end
    gradient_noise, gradient_kurtosis = estimator.gradient_noise(few)
    hessian_noise, hessian_kurtosis = estimator.hessian_noise(few[-1:])
    return {
        "gradient": estimator.gradient(models),
        "smoothness": estimator.smoothness(few),
        "hessian_lipschitz": estimator.hessian_lipschitz(few[-1:]) if smooth else None,
        "gradient_noise": gradient_noise,
        "hessian_noise": hessian_noise,
        "gradient_kurtosis": gradient_kurtosis,
        "hessian_kurtosis": hessian_kurtosis,
        "gradient_dissimilarity": estimator.gradient_dissimilarity(models),
        "hessian_dissimilarity": estimator.hessian_dissimilarity(few[-1:]),
    }


def _constants(estimates: Mapping[str, Estimate | None]) -> ProblemConstants:
    """The estimates as constants; without ρ only what needs none of it may be asked for."""
    return ProblemConstants(**{n: 0.0 if e is None else e.value for n, e in estimates.items()})


def _kind(algorithm: GMeta) -> Kind:
    if isinstance(algorithm.curvature, FirstOrder):
        return "first_order"
    return "exact" if isinstance(algorithm.curvature, Exact) else "hessian_free"


def _fd_step(algorithm: GMeta) -> float:
    """δ; the automatic step is so small that its own error is nothing beside the rest."""
    curvature = algorithm.curvature
    if isinstance(curvature, HessianFree) and curvature.fd_step != "auto":
        return float(curvature.fd_step)
    return 0.0
