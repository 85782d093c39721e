"""The bounds for the settings of a method."""

from __future__ import annotations

from dataclasses import asdict, replace

from nufed import theory
from nufed.algorithms.protocol import TheorySettings
from nufed.runs.bounds_record import GradientErrors, Kind, Promise, StepsRow, Terms
from nufed.theory import BatchSizes, GradientError, ProblemConstants, Training

KINDS: tuple[Kind, ...] = ("first_order", "hessian_free", "exact")


def gradient_error(
    kind: Kind, constants: ProblemConstants, alpha: float, batches: BatchSizes, fd_step: float
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
        terms=Terms(**asdict(terms)),
        total=terms.total,
    )


def fd_step(settings: TheorySettings) -> float:
    """δ; 0 for the automatic step, whose own error is negligible."""
    return 0.0 if settings.fd_step == "auto" else float(settings.fd_step)
