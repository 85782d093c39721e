"""What the theory says about a problem: from plain numbers, or from a finished run."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nufed import theory
from nufed.algorithms import GMeta
from nufed.data import Split
from nufed.errors import InputError, RunError
from nufed.estimate import Estimate, Estimator, spread
from nufed.evaluate import Measure
from nufed.metagrad import Exact, FirstOrder, HessianFree
from nufed.runs import Run
from nufed.runs.build import (
    build_federation,
    build_loss,
    build_module,
    build_objective,
    build_samples,
)
from nufed.runs.config import OWN, sentence
from nufed.simulation import DirectEngine
from nufed.theory import BatchSizes, GradientError, ProblemConstants, Training

KINDS = ("first_order", "hessian_free", "exact")
Kind = Literal["first_order", "hessian_free", "exact"]


def gradient_error(
    kind: str, constants: ProblemConstants, alpha: float, batches: BatchSizes, fd_step: float
) -> GradientError:
    """μ_F and σ_F² of an update by its name in the configuration."""
    if kind == "first_order":
        return theory.first_order_error(constants, alpha, batches)
    if kind == "hessian_free":
        return theory.hessian_free_error(constants, alpha, batches, fd_step)
    return theory.exact_error(constants, alpha, batches)


def table_by_steps(
    constants: ProblemConstants,
    alpha: float,
    batch_size: int,
    local_steps: int,
    fd_step: float,
    most_steps: int,
) -> list[dict[str, Any]]:
    """What every lemma gives for ν = 0 … ``most_steps``."""
    rows = []
    for steps in range(most_steps + 1):
        smoothness = theory.meta_smoothness(constants, alpha, steps)
        batches = BatchSizes.equal(batch_size, steps)
        errors = {k: gradient_error(k, constants, alpha, batches, fd_step) for k in KINDS}
        rows.append(
            {
                "steps": steps,
                "smoothness": smoothness,
                "largest_meta_lr": theory.largest_meta_lr(smoothness, local_steps),
                "dissimilarity": theory.meta_dissimilarity(constants, alpha, steps),
                "errors": {
                    k: {"bias": e.bias, "error": e.second_moment**0.5} for k, e in errors.items()
                },
            }
        )
    return rows


class Numbers(BaseModel):
    """The file of ``nufed bounds FILE.toml``: constants, and how training is run."""

    model_config = ConfigDict(extra="forbid", strict=True)

    constants: dict[str, float]
    adapt_lr: float = Field(description="α")
    adapt_steps: Annotated[int, Field(ge=0)] = Field(description="ν")
    batch_size: Annotated[int, Field(ge=1)] = Field(description="D")
    fd_step: float = Field(default=0.0, description="δ")
    curvature: Kind = "exact"
    meta_lr: float = Field(description="β")
    local_steps: Annotated[int, Field(ge=1)] = Field(description="τ")
    rounds: Annotated[int, Field(ge=1)] = Field(description="K")
    agents: Annotated[int, Field(ge=1)] = Field(description="N")
    cohort: Annotated[int, Field(ge=1)] = Field(description="m")
    initial_gap: Annotated[float, Field(ge=0)] = Field(description="F(w₀) − F*")


def bounds_of_numbers(path: Path) -> dict[str, Any]:
    """The bounds for the constants and settings in a TOML file."""
    try:
        numbers = Numbers.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} can't be read as TOML: {error}") from None
    except ValidationError as error:
        raise InputError(f"{path}: {sentence(error, list(Numbers.model_fields))}") from None
    names = {greek: name for name, greek in theory.GREEK.items()}
    given = {names.get(key, key): value for key, value in numbers.constants.items()}
    if set(given) != set(theory.GREEK):
        odd = sorted(set(given) ^ set(theory.GREEK))
        raise InputError(
            f"{path}: [constants] must hold {', '.join(theory.GREEK)}; missing or unknown: "
            f"{', '.join(odd)}"
        )
    constants = ProblemConstants(**given)
    return {
        "constants": {n: {"value": v, "samples": 0, "spread": 0.0} for n, v in given.items()},
        "smooth": True,
        "by_steps": table_by_steps(
            constants,
            numbers.adapt_lr,
            numbers.batch_size,
            numbers.local_steps,
            numbers.fd_step,
            max(numbers.adapt_steps, 1),
        ),
        "methods": [
            _promise(
                "given",
                constants,
                numbers.curvature,
                numbers.adapt_lr,
                BatchSizes.equal(numbers.batch_size, numbers.adapt_steps),
                numbers.fd_step,
                Training(
                    numbers.meta_lr,
                    numbers.local_steps,
                    numbers.rounds,
                    numbers.cohort,
                    numbers.agents,
                ),
                numbers.initial_gap,
            )
        ],
        "stationarity": [],
    }


def bounds_of_run(run: Run) -> dict[str, Any]:
    """Estimates, bounds and measurements for a finished run (its first seed)."""
    seed = run.config.seeds[0]
    estimator = _estimator(run, seed)
    methods = {n: a for n, a in run.config.algorithms().items() if isinstance(a, GMeta)}
    if not methods:
        raise InputError(f"{run.path} has no method that the paper's bounds are about")
    models = {name: _models(run, name, seed, estimator) for name in methods}
    places = [w for saved in models.values() for w in (saved[0][1], saved[-1][1])]
    smooth = estimator.is_smooth(places[0])
    estimates = _estimates(estimator, _distinct(places), smooth)
    shared, cohort = (
        run.config.method,
        len(run.methods[next(iter(methods))][seed].metrics[-1]["cohort"]),
    )
    result: dict[str, Any] = {
        "constants": {n: None if e is None else asdict(e) for n, e in estimates.items()},
        "smooth": smooth,
        "seed": seed,
        "by_steps": [],
        "methods": [],
        "stationarity": [],
    }
    constants = _constants(estimates)
    most = max(a.adapt_steps for a in methods.values()) if smooth else 0
    result["by_steps"] = table_by_steps(
        constants, shared.adapt_lr, shared.batch_size, shared.local_steps, 0.0, most
    )
    for name, algorithm in methods.items():
        last = models[name][-1][1]
        row: dict[str, Any] = {"method": name, "steps": algorithm.adapt_steps}
        if smooth or algorithm.adapt_steps == 0:
            row = _promise(
                name,
                constants,
                _kind(algorithm),
                float(algorithm.adapt_lr),
                BatchSizes.equal(algorithm.batch_size, algorithm.adapt_steps),
                _fd_step(algorithm),
                Training(
                    algorithm.meta_lr,
                    algorithm.local_steps,
                    run.config.rounds,
                    cohort,
                    len(estimator.federation.split.seen),
                ),
                _gap(estimator, algorithm, models[name][0][1]),
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a poor fd_step shows in the numbers
            measured = estimator.measure(last, algorithm)
        gradients = estimator.meta_gradients(last, algorithm)
        row["measured"] = {
            "bias": measured.bias,
            "error": measured.error,
            "dissimilarity": spread(gradients),
        }
        result["methods"].append(row)
        for round, w in models[name]:
            mean = estimator.meta_gradients(w, algorithm).mean(dim=0)
            value = float(mean.square().sum())
            result["stationarity"].append({"method": name, "round": round, "value": value})
    return result


def _promise(
    name: str,
    constants: ProblemConstants,
    kind: str,
    alpha: float,
    batches: BatchSizes,
    fd_step: float,
    training: Training,
    initial_gap: float,
) -> dict[str, Any]:
    """What Theorem 1 promises a method, at its own β if that is allowed, else at the largest."""
    steps = batches.steps
    smoothness = theory.meta_smoothness(constants, alpha, steps)
    largest = theory.largest_meta_lr(smoothness, training.local_steps)
    error = gradient_error(kind, constants, alpha, batches, fd_step)
    dissimilarity = theory.meta_dissimilarity(constants, alpha, steps)
    used = Training(**{**asdict(training), "meta_lr": min(training.meta_lr, largest)})
    terms = theory.convergence_bound(used, smoothness, error, dissimilarity, initial_gap)
    return {
        "method": name,
        "steps": steps,
        "smoothness": smoothness,
        "meta_lr": training.meta_lr,
        "largest_meta_lr": largest,
        "admissible": training.meta_lr <= largest,
        "bias": error.bias,
        "error": error.second_moment**0.5,
        "dissimilarity": dissimilarity,
        "terms": asdict(terms),
        "total": terms.total,
    }


def _estimator(run: Run, seed: int) -> Estimator:
    """The run's problem, made again from its configuration and checked against its split."""
    config = run.config
    if OWN in (config.data.source, config.model.name, config.loss):
        raise InputError(
            f"{run.path} was run from Python with a model, data or loss of its own, which can't be "
            "made again here; use nufed.estimate.Estimator there"
        )
    samples = build_samples(config.data)
    federation = build_federation(config.data, samples, seed)
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
    found = [(0, estimator.objective.initial())]
    try:
        found += [
            (int(path.stem.rpartition("-")[2]), load_file(path)["model"].double())
            for path in sorted(folder.glob("model-round-*.safetensors"))
        ]
        final = load_file(folder / "model.safetensors")["model"].double()
    except (OSError, SafetensorError, KeyError) as error:
        raise RunError(f"{folder} has no readable models: {error}") from error
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


def _gap(estimator: Estimator, algorithm: GMeta, w: Tensor) -> float:
    """F(w₀), which is F(w₀) − F* or more for losses that are never negative."""
    engine = DirectEngine(estimator.objective, estimator.federation, estimator.seed)
    states: dict[int, Any] = {agent: {} for agent in estimator.agents}
    steps = algorithm.adapt_steps
    scores = engine.evaluate(
        algorithm, {"model": w}, states, steps=steps, measure=Measure("loss", None)
    )
    return float(np.mean([s.loss[-1] for s in scores]))


def _kind(algorithm: GMeta) -> str:
    if isinstance(algorithm.curvature, FirstOrder):
        return "first_order"
    return "exact" if isinstance(algorithm.curvature, Exact) else "hessian_free"


def _fd_step(algorithm: GMeta) -> float:
    """δ; the automatic step is so small that its own error is nothing beside the rest."""
    curvature = algorithm.curvature
    if isinstance(curvature, HessianFree) and curvature.fd_step != "auto":
        return float(curvature.fd_step)
    return 0.0
