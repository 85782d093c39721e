"""What the bounds give for settings by their names in the configuration, as plain data."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Literal

from nufed import theory
from nufed.theory import BatchSizes, GradientError, ProblemConstants, Training

Kind = Literal["first_order", "hessian_free", "exact"]
KINDS: tuple[Kind, ...] = ("first_order", "hessian_free", "exact")


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


def promise(
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
    used = replace(training, meta_lr=min(training.meta_lr, largest))
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
        "trivial": (constants.gradient * (1 + alpha * constants.smoothness) ** steps) ** 2,
        "terms": asdict(terms),
        "total": terms.total,
    }
