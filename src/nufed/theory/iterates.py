"""Lemma 2: the distance of fine-tuning on batches from fine-tuning on all samples.

``variant="tight"`` (the default) is the tightest bound that docs/theory.md proves;
``variant="paper"`` is the bound as the paper prints it. Throughout c = 1 + αL, which bounds
‖I − α∇²f‖ and is the Lipschitz constant of one fine-tuning step.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from nufed.theory.constants import BatchSizes, ProblemConstants, need

Variant: TypeAlias = Literal["tight", "paper"]
Form: TypeAlias = Literal["closed", "recursion"]


def iterate_error(
    constants: ProblemConstants,
    alpha: float,
    batches: BatchSizes,
    step: int,
    variant: Variant = "tight",
    form: Form = "closed",
) -> float:
    """h_l: E‖w̃_l − w_l‖ ≤ h_l, the distance of the sampled from the true iterate (Lemma 2).

    Printed: h_{l+1} = c·h_l + ασ_G/√D_l. Tight: √h′_l, since E‖·‖ ≤ (E‖·‖²)^½.
    """
    if variant == "tight":
        return math.sqrt(iterate_error_squared(constants, alpha, batches, step, variant, form))
    c = growth(constants, alpha, step, batches)
    steps = [alpha * constants.gradient_noise / math.sqrt(d) for d in batches.adapt[:step]]
    return _accumulate(steps, c, form)


def iterate_error_squared(
    constants: ProblemConstants,
    alpha: float,
    batches: BatchSizes,
    step: int,
    variant: Variant = "tight",
    form: Form = "closed",
) -> float:
    """h′_l: E‖w̃_l − w_l‖² ≤ h′_l (Lemma 2).

    Printed: h′_{l+1} = (2 + 2α²L²)h′_l + 2α²σ_G²/D_l, from h′_1 = α²σ_G²/D_0.
    Tight: h′_{l+1} = c²h′_l + α²σ_G²/D_l, since the noise of a step has mean zero.
    """
    c = growth(constants, alpha, step, batches)
    noise = [(alpha * constants.gradient_noise) ** 2 / d for d in batches.adapt[:step]]
    if variant == "tight":
        return _accumulate(noise, c**2, form)
    later = [noise[0], *(2 * n for n in noise[1:])] if noise else []
    return _accumulate(later, 2 + 2 * (c - 1) ** 2, form)


def iterate_error_fourth(
    constants: ProblemConstants,
    alpha: float,
    batches: BatchSizes,
    step: int,
    variant: Variant = "tight",
    form: Form = "closed",
) -> float:
    """h″_l: E‖w̃_l − w_l‖⁴ ≤ h″_l (Lemma 2), with q_l = (κ_G + 3(D_l − 1)σ_G⁴)/D_l³.

    Printed: h″_{l+1} = (8 + 64α⁴L⁴)h″_l + 64α⁴q_l, from h″_1 = α⁴q_0.
    Tight: h″_{l+1} = c⁴h″_l + 8c²h′_l·α²σ_G²/D_l + 3α⁴q_l, from h″_1 = α⁴q_0.
    """
    c = growth(constants, alpha, step, batches)
    noise = [alpha**4 * fourth_moment(constants.gradient_kurtosis, constants.gradient_noise, d)
             for d in batches.adapt[:step]]  # fmt: skip
    if variant == "paper":
        later = [noise[0], *(64 * n for n in noise[1:])] if noise else []
        return _accumulate(later, 8 + 64 * (c - 1) ** 4, form)
    terms = noise[:1]
    for at in range(1, step):
        spread = iterate_error_squared(constants, alpha, batches, at)
        single = (alpha * constants.gradient_noise) ** 2 / batches.adapt[at]
        terms.append(8 * c**2 * spread * single + 3 * noise[at])
    return _accumulate(terms, c**4, form)


def iterate_bias(
    constants: ProblemConstants, alpha: float, batches: BatchSizes, step: int
) -> float:
    """m_l: ‖E[w̃_l − w_l]‖ ≤ m_l (not in the paper, which bounds it by h_l).

    m_{l+1} = c·m_l + (αρ/2)h′_l with m_0 = 0: a step is linear up to (αρ/2)‖w̃_l − w_l‖². It falls
    as 1/D, h_l only as 1/√D; the smaller of the two is returned.
    """
    c = growth(constants, alpha, step, batches)
    half = alpha * constants.hessian_lipschitz / 2
    second_order = [
        half * iterate_error_squared(constants, alpha, batches, at) for at in range(step)
    ]
    return min(
        _accumulate(second_order, c, "closed"), iterate_error(constants, alpha, batches, step)
    )


def growth(
    constants: ProblemConstants, alpha: float, steps: int, batches: BatchSizes | None = None
) -> float:
    """c = 1 + αL, after checking α and ν."""
    need(math.isfinite(alpha) and alpha >= 0, "alpha", alpha, "must be a finite number, 0 or more")
    need(isinstance(steps, int) and steps >= 0, "steps", steps, "must be a whole number, 0 or more")
    if batches is not None:
        need(steps <= batches.steps, "step", steps, f"there are {batches.steps} adaptation batches")
    return 1 + alpha * constants.smoothness


def _accumulate(terms: list[float], factor: float, form: Form) -> float:
    """x_{l+1} = factor·x_l + terms[l] from x_0 = 0: step by step, or in closed form."""
    if form == "recursion":
        total = 0.0
        for term in terms:
            total = factor * total + term
        return total
    return math.fsum(t * factor ** (len(terms) - 1 - j) for j, t in enumerate(terms))


def fourth_moment(kurtosis: float, deviation: float, size: int) -> float:
    """(κ + 3(D − 1)σ⁴)/D³: the fourth moment of the mean of D independent samples."""
    return (kurtosis + 3 * (size - 1) * deviation**4) / size**3
