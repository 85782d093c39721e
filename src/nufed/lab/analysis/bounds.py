"""The paper's bounds: of given numbers, and of a finished run, beside what is measured there.

A run's constants are estimated on its data (``estimate.py``).
"""

from __future__ import annotations

import tomllib
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from nufed import theory
from nufed.algorithms import GMeta
from nufed.algorithms.protocol import Algorithm, TheorySettings
from nufed.errors import InputError, NumericalWarning
from nufed.lab.analysis.estimate import Estimator, spread
from nufed.lab.config.describe import input_error
from nufed.lab.config.devices import torch_threads
from nufed.lab.config.problem import Given, Problem
from nufed.lab.files import write_sealed
from nufed.lab.runs import Run
from nufed.lab.runs.directory import BOUNDS
from nufed.lab.runs.part_files import read_received
from nufed.lab.runs.records import (
    BoundsRecord,
    ConstantRecord,
    CurvatureName,
    GradientErrors,
    MeasuredErrors,
    MethodBounds,
    NotCovered,
    Promise,
    Stationarity,
    StepsRow,
)
from nufed.meta.curvature import CURVATURES, HessianFree
from nufed.server import choose_cohort
from nufed.theory import BatchSizes, GradientError, ProblemConstants, Training

KINDS: tuple[CurvatureName, ...] = ("first_order", "hessian_free", "exact")


def gradient_error(
    kind: CurvatureName,
    constants: ProblemConstants,
    alpha: float,
    batches: BatchSizes,
    fd_step: float,
) -> GradientError:
    """μ_F and σ_F² of an update by its name in the configuration."""
    if kind == "first_order":
        return theory.first_order_error(constants, alpha, batches)
    if kind == "hessian_free":
        return theory.hessian_free_error(constants, alpha, batches, fd_step)
    return theory.exact_error(constants, alpha, batches)


def table_by_steps(
    constants: ProblemConstants, settings: TheorySettings, fd_step: float, most_steps: int
) -> list[StepsRow]:
    """The lemmas' bounds for ν = 0 … ``most_steps`` and every update, other settings as given."""
    alpha, rows = settings.adapt_lr, []
    for steps in range(most_steps + 1):
        smoothness = theory.meta_smoothness(constants, alpha, steps)
        batches = BatchSizes.equal(settings.batch_size, steps)
        errors = {k: gradient_error(k, constants, alpha, batches, fd_step) for k in KINDS}
        rows.append(
            StepsRow(
                steps=steps,
                smoothness=smoothness,
                largest_meta_lr=theory.largest_meta_lr(smoothness, settings.local_steps),
                dissimilarity=theory.meta_dissimilarity(constants, alpha, steps),
                errors={
                    k: GradientErrors(bias=e.bias, error=e.second_moment**0.5)
                    for k, e in errors.items()
                },
            )
        )
    return rows


def promise(
    constants: ProblemConstants,
    settings: TheorySettings,
    rounds: int,
    cohort: int,
    agents: int,
    initial_gap: float,
) -> Promise:
    """Theorem 1's bound for a method, at its own β if admissible, else at the largest such."""
    alpha, steps = settings.adapt_lr, settings.adapt_steps
    batches = BatchSizes.equal(settings.batch_size, steps)
    training = Training(settings.meta_lr, settings.local_steps, rounds, cohort, agents)
    smoothness = theory.meta_smoothness(constants, alpha, steps)
    largest = theory.largest_meta_lr(smoothness, training.local_steps)
    error = gradient_error(settings.kind, constants, alpha, batches, fd_step(settings))
    dissimilarity = theory.meta_dissimilarity(constants, alpha, steps)
    used = replace(training, meta_lr=min(training.meta_lr, largest))
    terms = theory.convergence_bound(used, smoothness, error, dissimilarity, initial_gap)
    return Promise(
        smoothness=smoothness,
        meta_lr=training.meta_lr,
        largest_meta_lr=largest,
        admissible=training.meta_lr <= largest,
        bias=error.bias,
        error=error.second_moment**0.5,
        dissimilarity=dissimilarity,
        trivial=(constants.gradient * (1 + alpha * constants.smoothness) ** steps) ** 2,
        terms=asdict(terms),
        total=terms.total,
    )


def fd_step(settings: TheorySettings) -> float:
    """δ; 0 for the automatic step, whose own error is negligible."""
    return 0.0 if settings.fd_step == "auto" else float(settings.fd_step)


GIVEN = "given"  # the name of the method that the numbers describe


class Numbers(BaseModel):
    """Constants, and the settings of training."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    constants: dict[str, float]
    adapt_lr: float = Field(description="α")
    adapt_steps: Annotated[int, Field(ge=0, le=50)] = Field(description="ν")
    batch_size: Annotated[int, Field(ge=1)] = Field(description="D")
    fd_step: Annotated[float, Field(ge=0)] | None = Field(default=None, description="δ")
    curvature: CurvatureName = "exact"
    meta_lr: float = Field(description="β")
    local_steps: Annotated[int, Field(ge=1)] = Field(description="τ")
    rounds: Annotated[int, Field(ge=1)] = Field(description="K")
    agents: Annotated[int, Field(ge=1)] = Field(description="N")
    cohort: Annotated[int, Field(ge=1)] = Field(description="m")
    initial_gap: Annotated[float, Field(ge=0)] = Field(description="F(w₀) − F*")


def bounds_of_numbers(path: Path) -> BoundsRecord:
    """The bounds for the constants and settings in a TOML file."""
    fields = Numbers.model_fields
    try:
        numbers = Numbers.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} can't be read as TOML: {error}") from None
    except ValidationError as error:
        raise InputError(f"{path}: {input_error(error, fields, fields)}") from None
    names = {greek: name for name, greek in theory.GREEK.items()}
    given = {names.get(key, key): value for key, value in numbers.constants.items()}
    if set(given) != set(theory.GREEK):
        odd = sorted(set(given) ^ set(theory.GREEK))
        raise InputError(
            f"{path}: [constants] must hold {', '.join(theory.GREEK)}; missing or unknown: "
            f"{', '.join(odd)}"
        )
    if len(given) < len(numbers.constants):
        raise InputError(
            f"{path}: [constants] gives a constant by its letter and by its name: keep one"
        )
    if numbers.curvature == "hessian_free" and numbers.fd_step is None:
        raise InputError(f"{path}: curvature = 'hessian_free' needs fd_step, the paper's δ")
    try:
        return _bounds(numbers, ProblemConstants(**given))
    except OverflowError:
        raise InputError(
            f"{path}: these numbers give bounds too large to compute; lower adapt_lr or adapt_steps"
        ) from None


def _bounds(numbers: Numbers, constants: ProblemConstants) -> BoundsRecord:
    settings = TheorySettings(
        numbers.adapt_steps,
        numbers.adapt_lr,
        numbers.meta_lr,
        numbers.local_steps,
        numbers.batch_size,
        numbers.curvature,
        numbers.fd_step or 0.0,
    )
    promised = promise(
        constants, settings, numbers.rounds, numbers.cohort, numbers.agents, numbers.initial_gap
    )
    return BoundsRecord(
        constants={name: ConstantRecord(value=v) for name, v in asdict(constants).items()},
        smooth=True,
        uniform=True,
        by_steps_of=GIVEN,
        by_steps=table_by_steps(
            constants, settings, fd_step(settings), max(numbers.adapt_steps, 1)
        ),
        methods=[MethodBounds(method=GIVEN, steps=numbers.adapt_steps, promised=promised)],
    )


def write_bounds(run: Run, *, trust: bool = False) -> BoundsRecord:
    """The bounds of a run, which are also written to its ``bounds.json``."""
    with torch_threads(run.config.threads):
        record = bounds_of_run(run, trust=trust)
    write_sealed(run.path / BOUNDS, record.record())
    return record


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
    settings = {name: algorithm.notes.theory(algorithm) for name, algorithm in trained.items()}
    methods = {name: covered for name, covered in settings.items() if covered is not None}
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
    # without ρ, only bounds that do not use it are valid
    values = {n: 0.0 if e is None else float(e.value or 0.0) for n, e in estimates.items()}
    constants = ProblemConstants(**values)
    first = next(iter(methods))
    most = max(covered.adapt_steps for covered in methods.values()) if smooth else -1
    largest = max(fd_step(covered) for covered in methods.values())
    paper = {name: _paper_algorithm(covered) for name, covered in methods.items()}
    return BoundsRecord(
        constants=estimates,
        smooth=smooth,
        seed=seed,
        by_steps_of=first,
        by_steps=table_by_steps(constants, methods[first], largest, most),
        uniform=all(covered.uniform for covered in methods.values()),
        methods=[
            MethodBounds(
                method=name,
                steps=covered.adapt_steps,
                # the theory does not cover losses with kinks
                promised=_promised(run, name, covered, constants, estimator) if smooth else None,
                measured=_measured(estimator, models[name][-1][1], paper[name]),
            )
            for name, covered in methods.items()
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


def _paper_algorithm(settings: TheorySettings) -> GMeta:
    """Algorithm 1 of the paper with these settings."""
    kind = CURVATURES[settings.kind]
    return GMeta(
        settings.adapt_steps,
        HessianFree(settings.fd_step) if kind is HessianFree else kind(),
        adapt_lr=settings.adapt_lr,
        meta_lr=settings.meta_lr,
        local_steps=settings.local_steps,
        batch_size=settings.batch_size,
    )


def _promised(
    run: Run,
    method: str,
    settings: TheorySettings,
    constants: ProblemConstants,
    estimator: Estimator,
) -> Promise:
    agents = estimator.federation.split.seen
    cohort = choose_cohort(agents, run.config.participation, seed=0, round=0)
    # F(w₀), an upper bound of F(w₀) − F* for non-negative losses
    gap = estimator.meta_value(estimator.objective.initial(), _paper_algorithm(settings))
    return promise(constants, settings, run.config.rounds_of(method), len(cohort), len(agents), gap)


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
    models = [(0, objective.double.initial())]
    for round, path in {**saved, final: folder / "model.safetensors"}.items():
        model = algorithm.global_model(objective, read_received(path, algorithm, objective))
        assert model is not None  # which the theory covers
        models.append((round, model.double()))
    return models


def _distinct(models: list[Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []
    for w in models:
        if not any(torch.equal(w, k) for k in kept):
            kept.append(w)
    return kept


def _estimates(
    estimator: Estimator, models: list[Tensor], smooth: bool
) -> dict[str, ConstantRecord | None]:
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
