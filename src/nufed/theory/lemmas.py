"""Lemmas 1 to 6: smoothness, iterates, the errors of the three updates, dissimilarity of agents.

``variant="tight"`` (the default) is the tightest bound that docs/theory.md proves;
``variant="paper"`` is the bound as the paper prints it. Throughout c = 1 + αL, which bounds
‖I − α∇²f‖ and is the Lipschitz constant of one fine-tuning step.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nufed.theory.constants import BatchSizes, FalseBoundWarning, ProblemConstants, need


@dataclass(frozen=True)
class GradientError:
    """How far a stochastic meta-gradient is from ∇F_i(w): at any w, for any agent.

    ``bias`` (μ_F) bounds ‖E[∇̃F_i − ∇F_i]‖ and ``second_moment`` (σ_F²) bounds E‖∇̃F_i − ∇F_i‖².
    """

    bias: float
    second_moment: float


def meta_smoothness(constants: ProblemConstants, alpha: float, steps: int) -> float:
    """L_F: ‖∇F_i(w) − ∇F_i(u)‖ ≤ L_F‖w − u‖ (Lemma 1; holds as printed).

    L_F = L·c^{2ν} + Bαρ·c^{ν−1}·Σ_{l<ν} c^l, for any α ≥ 0 and ν ≥ 0.

    >>> c = ProblemConstants(2, 1, 3, 0, 0, 0, 0, 0, 0)
    >>> meta_smoothness(c, 1.0, 1)            # Per-FedAvg: L(1 + αL)² + Bαρ
    10.0
    """
    c = growth(constants, alpha, steps)
    curved = constants.gradient * alpha * constants.hessian_lipschitz
    total = constants.smoothness * c ** (2 * steps)
    return total + curved * sum(c ** (steps - 1 + step) for step in range(steps))


def exact_error(
    constants: ProblemConstants, alpha: float, batches: BatchSizes, variant: Variant = "tight"
) -> GradientError:
    """μ_F and σ_F² of the exact update (Lemma 3), for any ν ≥ 0 (the paper asks for ν > 1).

    Tight: given the iterates, the curvature batches and the last one are independent and unbiased,
    so that only the iterates bias the result; σ_H in the spectral norm is enough, no kurtosis.
    Printed: never below it; its proof needs σ_H and κ_H in the Frobenius norm.
    """
    if variant == "tight":
        return hessian_free_error(constants, alpha, batches, 0.0)
    steps, c = batches.steps, growth(constants, alpha, batches.steps)
    h, h2, h4 = (
        f(constants, alpha, batches, steps, "paper")
        for f in (iterate_error, iterate_error_squared, iterate_error_fourth)
    )
    d, d4 = product_error(constants, alpha, batches)
    last = constants.gradient_noise**2 / batches.outer + constants.smoothness**2 * h2
    last4 = fourth_moment(constants.gradient_kurtosis, constants.gradient_noise, batches.outer)
    last4 += constants.smoothness**4 * h4
    bend = constants.gradient * alpha * constants.hessian_lipschitz * c ** (steps - 1)
    earlier = sum(iterate_error(constants, alpha, batches, j, "paper") for j in range(1, steps))
    noise = constants.gradient_noise / math.sqrt(batches.outer)
    return GradientError(
        bias=c**steps * (noise + constants.smoothness * h) + bend * earlier + math.sqrt(d * last),
        second_moment=3 * c ** (2 * steps) * last
        + 3 * constants.gradient**2 * d
        + 6 * math.sqrt(2 * d4 * last4),
    )


def product_error(
    constants: ProblemConstants, alpha: float, batches: BatchSizes
) -> tuple[float, float]:
    """d_ν and d′_ν as printed (Lemma 3): the second and fourth moment of ‖Π(I−αH̃_l) − Π(I−αH_l)‖.

    The norms of σ_H and κ_H are Frobenius norms here: for the mean of D matrices σ_H²/D does not
    bound the second moment of the spectral norm (docs/theory.md has a counterexample).
    """
    c = growth(constants, alpha, batches.steps)
    rho, sigma = constants.hessian_lipschitz, constants.hessian_noise
    d = d4 = 0.0
    for at, size in enumerate(batches.curvature):
        spread = iterate_error_squared(constants, alpha, batches, at, "paper")
        spread4 = iterate_error_fourth(constants, alpha, batches, at, "paper")
        noise4 = fourth_moment(constants.hessian_kurtosis, sigma, size)
        if at == 0:
            d, d4 = alpha**2 * sigma**2 / size, alpha**4 * noise4
            continue
        d = 2 * d * (c + alpha * sigma / math.sqrt(size)) ** 2 + 2 * alpha**2 * c ** (2 * at) * (
            sigma**2 / size + rho**2 * spread
        )
        d4 = 64 * d4 * (c**4 + alpha**4 * noise4) + 64 * alpha**4 * c ** (4 * at) * (
            rho**4 * spread4 + noise4
        )
    return d, d4


def first_order_error(
    constants: ProblemConstants, alpha: float, batches: BatchSizes, variant: Variant = "tight"
) -> GradientError:
    """μ_F and σ_F² of the first-order update (Lemma 5).

    Printed: ‖I − Π(I−αH_l)‖ ≤ c^ν + 1. Tight: ≤ c^ν − 1, which vanishes with α; and the last
    gradient is unbiased given w̃_ν, so that its noise is no bias.
    """
    steps, c = batches.steps, growth(constants, alpha, batches.steps)
    h2 = iterate_error_squared(constants, alpha, batches, steps, variant)
    noise = constants.gradient_noise**2 / batches.outer
    if variant == "paper":
        h = iterate_error(constants, alpha, batches, steps, "paper")
        omitted = constants.gradient * (c**steps + 1)
        return GradientError(
            bias=math.sqrt(noise) + constants.smoothness * h + omitted,
            second_moment=2 * noise + 2 * constants.smoothness**2 * h2 + 2 * omitted**2,
        )
    omitted = constants.gradient * (c**steps - 1)
    return GradientError(
        bias=_last_gradient_bias(constants, alpha, batches) + omitted,
        second_moment=noise + (constants.smoothness * math.sqrt(h2) + omitted) ** 2,
    )


def hessian_free_error(
    constants: ProblemConstants,
    alpha: float,
    batches: BatchSizes,
    fd_step: float,
    variant: Variant = "tight",
) -> GradientError:
    """μ_F and σ_F² of the Hessian-free update with δ = ``fd_step``, against ∇F_i (Lemma 6).

    Printed: μ = p + q and σ² = 2p′ + 2q², which grow as 1/δ.
    Tight: the two gradients of a difference share their batch, so that their noise is that of a
    Hessian, without 1/δ; the error of the difference is ρδ‖v‖²/2, half of the paper's. For δ = 0 it
    is the bound of the exact update.
    """
    steps, c = batches.steps, growth(constants, alpha, batches.steps)
    need(fd_step >= 0 and math.isfinite(fd_step), "fd_step", fd_step, "must be 0 or more")
    if variant == "paper":
        p, p2 = difference_noise(constants, alpha, batches, fd_step)
        q = difference_bias(constants, alpha, steps, fd_step)
        return GradientError(bias=p + q, second_moment=2 * p2 + 2 * q**2)
    noise, bent = _recursion_noise(constants, alpha, batches, fd_step)
    off = difference_bias(constants, alpha, steps, fd_step) / 2
    bend = constants.gradient * alpha * constants.hessian_lipschitz * c ** (steps - 1)
    earlier = sum(iterate_error(constants, alpha, batches, at) for at in range(1, steps))
    spread = c**steps * constants.smoothness * iterate_error(constants, alpha, batches, steps)
    spread += bend * earlier + off
    bias = bent + off + c**steps * _last_gradient_bias(constants, alpha, batches) + bend * earlier
    second_moment = noise + 2 * bent * spread + spread**2
    if fd_step > 0:  # for large steps the printed bound can be the smaller one
        printed = hessian_free_error(constants, alpha, batches, fd_step, "paper")
        bias = min(bias, printed.bias)
        second_moment = min(second_moment, printed.second_moment)
    return GradientError(min(bias, math.sqrt(second_moment)), second_moment)


def difference_noise(
    constants: ProblemConstants, alpha: float, batches: BatchSizes, fd_step: float
) -> tuple[float, float]:
    """p_ν and p′_ν as printed (Lemma 6): moments of the noise of the Hessian-free recursion."""
    need(fd_step > 0, "fd_step", fd_step, "the printed bound needs a step above 0")
    steps, c = batches.steps, growth(constants, alpha, batches.steps)
    smoothness = constants.smoothness

    def last(size: int, at: int) -> tuple[float, float, float]:
        h = iterate_error(constants, alpha, batches, at, "paper")
        h2 = iterate_error_squared(constants, alpha, batches, at, "paper")
        sigma = constants.gradient_noise
        return sigma / math.sqrt(size) + smoothness * h, sigma**2 / size, smoothness**2 * h2

    p, noise, spread = last(batches.outer, steps)
    p2 = noise + spread
    for at in reversed(range(steps)):
        first, noise, spread = last(batches.curvature[at], at)
        p = c * p + alpha / fd_step * first
        p2 = 3 * p2 * (1 + (c - 1) ** 2) + 1.5 * (alpha / fd_step) ** 2 * (noise + 2 * spread)
    return p, p2


def difference_bias(constants: ProblemConstants, alpha: float, steps: int, fd_step: float) -> float:
    """q_ν = αρδB²·Σ_{i<ν} c^{ν+i−1} as printed (Lemma 6): the finite differences' own error."""
    c = growth(constants, alpha, steps)
    bend = alpha * constants.hessian_lipschitz * fd_step * constants.gradient**2
    return bend * sum(c ** (steps + i - 1) for i in range(steps))


def product_dissimilarity(constants: ProblemConstants, alpha: float, steps: int) -> float:
    """g_ν = α²γ_H²c^{2ν−2}·(2^{ν−1} + Σ_{0<l<ν} 2^l) as printed (Lemma 4; only right for ν ≤ 1).

    It is meant to bound the variance over agents of the product Π(I − α∇²f_i(w_l)).
    """
    c = growth(constants, alpha, steps)
    if steps == 0:
        return 0.0
    powers = 2 ** (steps - 1) + sum(2**i for i in range(1, steps))
    return float((alpha * constants.hessian_dissimilarity) ** 2 * c ** (2 * steps - 2) * powers)


def meta_dissimilarity(
    constants: ProblemConstants, alpha: float, steps: int, variant: Variant = "tight"
) -> float:
    """γ_F: (1/N)Σ‖∇F_i(w) − ∇F(w)‖² ≤ γ_F² (Lemma 4).

    Tight: γ_F = αB·c^{ν−1}·Σ_{l<ν}(γ_H + ρs_l) + γ_G·c^{2ν} with s_l = γ_G(c^l − 1)/L, and at most
    B·c^ν. Printed: γ_F² = 15B²g_ν + 6γ_G²c^{2ν}(1 + α²L²), which is false for ν ≥ 2 (it takes the
    iterates of all agents for the same) and warned about there.
    """
    c = growth(constants, alpha, steps)
    gamma_g, gamma_h = constants.gradient_dissimilarity, constants.hessian_dissimilarity
    if variant == "paper":
        if steps >= 2:
            warnings.warn(
                "Lemma 4 as printed is false for ν ≥ 2 (docs/theory.md has a counterexample)",
                FalseBoundWarning,
                stacklevel=2,
            )
        squared = 15 * constants.gradient**2 * product_dissimilarity(constants, alpha, steps)
        return math.sqrt(squared + 6 * gamma_g**2 * c ** (2 * steps) * (1 + (c - 1) ** 2))
    apart = [gamma_g * (c**at - 1) / constants.smoothness for at in range(steps)]
    products = sum(gamma_h + constants.hessian_lipschitz * s for s in apart)
    bound = alpha * constants.gradient * c ** (steps - 1) * products + gamma_g * c ** (2 * steps)
    return min(bound, constants.gradient * c**steps)


def _recursion_noise(
    constants: ProblemConstants, alpha: float, batches: BatchSizes, fd_step: float
) -> tuple[float, float]:
    """Given the iterates: E‖d̃_ν − D̄_ν‖² and ‖E[d̃_ν − D̄_ν]‖ of the backward recursion.

    d̃ is the sampled recursion and D̄ the same without noise; their difference has a mean other than
    zero only through the curvature of the finite difference in d, at most αρδ.
    """
    c = growth(constants, alpha, batches.steps)
    noise, bent, size = constants.gradient_noise**2 / batches.outer, 0.0, constants.gradient
    for at in reversed(range(batches.steps)):
        sampled = size**2 + 2 * size * bent + noise  # E‖d̃‖²
        bent = c * bent + alpha * constants.hessian_lipschitz * fd_step / 2 * noise
        single = constants.hessian_noise**2 * sampled  # of one sample's product
        if fd_step > 0:
            single = min(single, (constants.gradient_noise / fd_step) ** 2)
        noise, size = c**2 * noise + alpha**2 * single / batches.curvature[at], c * size
        bent = min(bent, math.sqrt(noise))
    return noise, bent


def _last_gradient_bias(constants: ProblemConstants, alpha: float, batches: BatchSizes) -> float:
    """‖E[∇f(w̃_ν) − ∇f(w_ν)]‖: by the first moment of w̃_ν − w_ν, or by its mean and its square."""
    steps = batches.steps
    plain = constants.smoothness * iterate_error(constants, alpha, batches, steps)
    spread = iterate_error_squared(constants, alpha, batches, steps)
    mean = constants.smoothness * iterate_bias(constants, alpha, batches, steps)
    return min(plain, mean + constants.hessian_lipschitz / 2 * spread)


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
