"""Bounds for a finished run: constants estimated on its data, predictions beside measurements."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from nufed.algorithms import GMeta
from nufed.algorithms.protocol import Algorithm, TheorySettings
from nufed.analysis.estimate import Estimator, LowerEstimate, spread
from nufed.analysis.promise import fd_step, promise, table_by_steps
from nufed.config.problem import Given, Problem
from nufed.errors import InputError, NumericalWarning
from nufed.meta.curvature import CURVATURES, HessianFree
from nufed.runs import Run
from nufed.runs.bounds_record import (
    BoundsRecord,
    ConstantRecord,
    MeasuredErrors,
    MethodBounds,
    NotCovered,
    Promise,
    Stationarity,
)
from nufed.runs.part_files import read_received
from nufed.server import choose_cohort
from nufed.theory import ProblemConstants


def bounds_of_run(run: Run, *, given: Given | None = None, trust: bool = False) -> BoundsRecord:
    """Estimates, bounds and measurements for a finished run (its first seed).

    Args:
        run: from :func:`nufed.load_run`.
        given: the objects that were passed to :func:`nufed.run`.
        trust: allow importing the code that the run names, if it names any.
    """
    seed = run.config.seeds[0]
    problem = Problem.rebuild(run.recorded, given, trust=trust, seeds=[seed])
    trained = {n: a for n, a in problem.algorithms.items() if seed in run.methods.get(n, {})}
    settings = {name: algorithm.theory() for name, algorithm in trained.items()}
    methods = {name: own for name, own in settings.items() if own is not None}
    not_covered = [
        NotCovered(method=name, reason=_why_not(trained[name]))
        for name in settings
        if name not in methods
    ]
    if not methods:
        listed = "; ".join(f"{each.method}: {each.reason}" for each in not_covered)
        raise InputError(f"{run.path} has no method that the paper's bounds cover ({listed})")
    estimator = Estimator(problem.objectives[seed], problem.federations[seed], seed)
    models = {name: _models(run, name, seed, problem) for name in methods}
    ends = [w for saved in models.values() for w in (saved[0][1], saved[-1][1])]
    smooth = estimator.is_smooth(ends[0])
    estimates = _estimates(estimator, _distinct(ends), smooth)
    constants = _constants(estimates)
    first = next(iter(methods))
    most = max(own.adapt_steps for own in methods.values()) if smooth else -1
    largest = max(fd_step(own) for own in methods.values())
    paper = {name: _paper_algorithm(own) for name, own in methods.items()}
    return BoundsRecord(
        constants={
            n: None if e is None else ConstantRecord(**asdict(e)) for n, e in estimates.items()
        },
        smooth=smooth,
        seed=seed,
        by_steps_of=first,
        by_steps=table_by_steps(constants, methods[first], largest, most),
        uniform=all(own.uniform for own in methods.values()),
        methods=[
            MethodBounds(
                method=name,
                steps=own.adapt_steps,
                # the theory does not cover losses with kinks
                promised=_promised(run, own, constants, estimator) if smooth else None,
                measured=_measured(estimator, models[name][-1][1], paper[name]),
            )
            for name, own in methods.items()
        ],
        not_covered=not_covered,
        stationarity=[
            Stationarity(method=name, round=round, value=_stationarity(estimator, w, paper[name]))
            for name in methods
            for round, w in models[name]
        ],
    )


def _why_not(algorithm: Algorithm) -> str:
    return (
        "the paper's bounds cover Algorithm 1 with one fixed step size of fine-tuning, which "
        f"{type(algorithm).__name__} with these settings is not"
    )


def _paper_algorithm(own: TheorySettings) -> GMeta:
    """Algorithm 1 of the paper with these settings."""
    kind = CURVATURES[own.kind]
    return GMeta(
        own.adapt_steps,
        HessianFree(own.fd_step) if kind is HessianFree else kind(),
        adapt_lr=own.adapt_lr,
        meta_lr=own.meta_lr,
        local_steps=own.local_steps,
        batch_size=own.batch_size,
    )


def _promised(
    run: Run, own: TheorySettings, constants: ProblemConstants, estimator: Estimator
) -> Promise:
    agents = estimator.federation.split.seen
    cohort = choose_cohort(agents, run.config.participation, seed=0, round=0)
    # F(w₀), an upper bound of F(w₀) − F* for non-negative losses
    gap = estimator.meta_value(estimator.objective.initial(), _paper_algorithm(own))
    return promise(constants, own, run.config.rounds, len(cohort), len(agents), gap)


def _measured(estimator: Estimator, w: Tensor, algorithm: GMeta) -> MeasuredErrors:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # a poor fd_step shows in the numbers
        measured = estimator.measure(w, algorithm)
    apart = spread(estimator.meta_gradients(w, algorithm))
    return MeasuredErrors(bias=measured.bias, error=measured.error, dissimilarity=apart)


def _stationarity(estimator: Estimator, w: Tensor, algorithm: GMeta) -> float:
    """‖∇F(w)‖², over all seen agents."""
    return float(estimator.meta_gradients(w, algorithm).mean(dim=0).square().sum())


def _models(run: Run, name: str, seed: int, problem: Problem) -> list[tuple[int, Tensor]]:
    """The saved models of a method by round: the initial, those in between, and the final one."""
    folder = run.path / "methods" / name / f"seed-{seed}"
    algorithm, objective = problem.algorithms[name], problem.objectives[seed]
    final = run.methods[name][seed].round
    saved = {
        int(number): path
        for path in sorted(folder.glob("model-round-*.safetensors"))
        if (number := path.stem.removeprefix("model-round-")).isdecimal() and int(number) < final
    }
    found = [(0, objective.double.initial())]
    for round, path in {**saved, final: folder / "model.safetensors"}.items():
        model = algorithm.global_model(objective, read_received(path, algorithm, objective))
        assert model is not None  # which the theory covers
        found.append((round, model.double()))
    return found


def _distinct(models: list[Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []
    for w in models:
        if not any(torch.equal(w, k) for k in kept):
            kept.append(w)
    return kept


def _estimates(
    estimator: Estimator, models: list[Tensor], smooth: bool
) -> dict[str, LowerEstimate | None]:
    few = [models[0], models[-1]]  # curvature is costly: only at an initial and a final model
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


def _constants(estimates: Mapping[str, LowerEstimate | None]) -> ProblemConstants:
    """The estimates as constants; without ρ, only bounds that do not use it are valid."""
    return ProblemConstants(**{n: 0.0 if e is None else e.value for n, e in estimates.items()})
