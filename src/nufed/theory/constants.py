"""The inputs of the bounds: the constants of a problem, and batch sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

ROUNDING = 0.01  # relative; constants may be copied from a table of three digits
UNDERFLOW = 1e-77  # smaller numbers have a subnormal fourth power


class TheoryError(ValueError):
    """A value outside the conditions of a result; the message says which."""


class FalseBoundWarning(UserWarning):
    """A bound as printed was requested where it does not hold."""


def need(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise a :class:`TheoryError` about ``name`` unless ``ok``."""
    if not ok:
        raise TheoryError(f"{name} = {value}: {allowed}")


@dataclass(frozen=True)
class ProblemConstants:
    """The constants of the paper's Assumptions 2-5, each a bound that holds at every w.

    Args:
        gradient: B, ‖∇f_i(w)‖ ≤ B.
        smoothness: L, ‖∇f_i(w) − ∇f_i(u)‖ ≤ L‖w − u‖.
        hessian_lipschitz: ρ, ‖∇²f_i(w) − ∇²f_i(u)‖ ≤ ρ‖w − u‖.
        gradient_noise: σ_G, the standard deviation of one sample's gradient.
        hessian_noise: σ_H, the same of one sample's Hessian. For the bounds as printed it is taken
            in the Frobenius norm; for the others the spectral norm is enough.
        gradient_kurtosis: κ_G ≥ σ_G⁴, the fourth moment of one sample's gradient about its mean.
        hessian_kurtosis: κ_H ≥ σ_H⁴, the same of one sample's Hessian, in the Frobenius norm (only
            the bounds as printed use it).
        gradient_dissimilarity: γ_G ≤ 2B, the standard deviation of ∇f_i over agents.
        hessian_dissimilarity: γ_H, the same of ∇²f_i; the spectral norm is enough.

    Constants that no problem can have are refused, up to rounding (docs/theory.md, The constants).
    """

    gradient: float
    smoothness: float
    hessian_lipschitz: float
    gradient_noise: float
    hessian_noise: float
    gradient_kurtosis: float
    hessian_kurtosis: float
    gradient_dissimilarity: float
    hessian_dissimilarity: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            ok = isinstance(value, int | float) and math.isfinite(value) and value >= 0
            need(ok, field.name, value, "must be a finite number, 0 or more")
        need(self.smoothness > 0, "smoothness", self.smoothness, "must be above 0")
        self._need_fourth_moment("gradient_kurtosis", "gradient_noise")
        self._need_fourth_moment("hessian_kurtosis", "hessian_noise")
        most = 2 * self.gradient
        need(
            self.gradient_dissimilarity <= (1 + ROUNDING) * most,
            "gradient_dissimilarity",
            self.gradient_dissimilarity,
            f"must be at most 2·gradient = {most:g}, since gradients no longer than gradient are "
            "no further than that from their mean; lower it, or raise gradient",
        )

    def _need_fourth_moment(self, kurtosis: str, noise: str) -> None:
        """κ ≥ σ⁴ (Jensen), compared as κ^¼ ≥ σ, which does not overflow."""
        fourth, deviation = getattr(self, kurtosis), getattr(self, noise)
        most = fourth**0.25
        need(
            most >= (1 - ROUNDING) * deviation or deviation < UNDERFLOW,
            kurtosis,
            fourth,
            f"must be at least {noise}⁴ with {noise} = {deviation}, since a fourth moment is never "
            f"below the square of the second; raise it (a standardised kurtosis is to be "
            f"multiplied by {noise}⁴), or lower {noise} to {most:.3g}",
        )


GREEK = {
    "gradient": "B",
    "smoothness": "L",
    "hessian_lipschitz": "ρ",
    "gradient_noise": "σ_G",
    "hessian_noise": "σ_H",
    "gradient_kurtosis": "κ_G",
    "hessian_kurtosis": "κ_H",
    "gradient_dissimilarity": "γ_G",
    "hessian_dissimilarity": "γ_H",
}


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of the batches of one meta-gradient.

    ``adapt`` holds D_0 … D_{ν−1}, ``outer`` is D_ν, ``curvature`` holds D′_0 … D′_{ν−1}: ν is the
    length of ``adapt``.
    """

    adapt: tuple[int, ...]
    outer: int
    curvature: tuple[int, ...]

    def __post_init__(self) -> None:
        for size in (*self.adapt, self.outer, *self.curvature):
            need(isinstance(size, int) and size >= 1, "batch size", size, "must be 1 or more")
        same = len(self.adapt) == len(self.curvature)
        need(same, "curvature", self.curvature, f"must hold {len(self.adapt)} sizes, as adapt does")

    @classmethod
    def equal(cls, size: int, steps: int) -> BatchSizes:
        """Batches of one size, for ν = ``steps``.

        >>> BatchSizes.equal(40, 2)
        BatchSizes(adapt=(40, 40), outer=40, curvature=(40, 40))
        """
        need(steps >= 0, "steps", steps, "must be 0 or more")
        return cls((size,) * steps, size, (size,) * steps)

    @property
    def steps(self) -> int:
        """ν."""
        return len(self.adapt)
