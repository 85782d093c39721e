"""Curvature: the three ways in which a Hessian-vector product enters the meta-gradient.

Below are also the step of finite differences with a check of it, and the largest eigenvalue of a
Hessian, by Lanczos iteration. The step δ of (∇f(w+δv) − ∇f(w−δv)) / 2δ trades two errors off. A
large step crosses kinks of ReLU units, and the difference then measures jumps instead of curvature;
a small one is dominated by rounding. In float32 no step may be good: on the paper's network a usual
δ = 10⁻³ is worse than ignoring curvature. In float64 there is a wide range: with w ± δv about 10⁻⁸
apart (relative to w), crossings are rare and rounding costs about eight of sixteen digits. So the
automatic step evaluates its two gradients in float64, at about twice the time and memory of float32
gradients of compute-bound models, and at no cost for models dominated by per-operation overhead.

A rare crossing still adds a jump of the gradient divided by a tiny step: one of them can ruin a
training run (on CIFAR one product in 250 is 10⁵ times too large). So where the norm of a product is
much larger than that of v, one-sided differences are taken between w + δv and w + 2δv and between w
− 2δv and w − δv, which a kink at w does not affect, and the one on w's side of the kink is used.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import ClassVar, Literal, TypeAlias
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from nufed.errors import InputError, NumericalWarning
from nufed.meta.fine_tuning import descend
from nufed.objective import AnyBatch, AnyObjective, Objective
from nufed.objective.parts import Part
from nufed.settings import check_settings, setting

RELATIVE_STEP = math.sqrt(torch.finfo(torch.float64).eps)
STEEP = 100  # ‖∇²f·v‖/‖v‖ above which a product is recomputed; on the paper's network it is 5 to 20
STEP_SHRINK, MAX_RETRIES = 16, 4
POOR = 0.1  # relative error of a product above which a fixed step is called poor


def difference(
    objective: AnyObjective, w: Tensor, batch: AnyBatch, v: Tensor, step: float | Tensor
) -> Tensor:
    """(∇f(w+δv) − ∇f(w−δv)) / 2δ ≈ ∇²f(w)·v, with δ = ``step`` (the paper's HF approximation)."""
    ahead, behind = objective.beside(w, batch, v, step)
    return (ahead - behind) / (2 * step)


def double_difference(
    objective: AnyObjective,
    w: Tensor,
    batch: AnyBatch,
    v: Tensor,
    step: float | Tensor | None = None,
) -> Tensor:
    """The difference, evaluated in float64.

    ``step=None`` takes δ = √ε·(1 + ‖w‖)/‖v‖ with ε the machine epsilon of float64, for each row of
    a stack, and avoids kinks.
    """
    try:
        if step is None:
            wide = _without_kinks(objective, w, batch, v)
        else:
            wide = difference(objective.double, w, batch, v, step)
    except (RuntimeError, TypeError) as error:
        objective.grad(w, batch)  # if this fails too, float64 is not the cause
        raise InputError(
            'fd_step = "auto" evaluates gradients in float64, which this module or loss does not '
            f"take ({error}); let it create its tensors in the dtype of its inputs, or give "
            "fd_step as a number, or use exact curvature"
        ) from error
    return wide.to(w.dtype)


def _without_kinks(objective: AnyObjective, w: Tensor, batch: AnyBatch, v: Tensor) -> Tensor:
    """The central difference, or a one-sided one where the gradient seems to jump."""
    wide, length = objective.double, objective.norm(v).double()
    step = RELATIVE_STEP * (1 + objective.norm(w).double()) / torch.where(length > 0, length, 1)
    ahead, behind = wide.beside(w, batch, v, step)
    central = (ahead - behind) / (2 * step)
    steep = wide.norm(central) > STEEP * length
    if not steep.any():
        return central
    middle, _ = wide.beside(w, batch, v, 0 * step)
    for _ in range(MAX_RETRIES):
        far_ahead, far_behind = wide.beside(w, batch, v, 2 * step)
        forward, backward = (far_ahead - ahead) / step, (behind - far_behind) / step
        onwards = wide.norm(ahead - middle) < wide.norm(middle - behind)  # the kink is behind w
        best = forward * onwards.double() + backward * (~onwards).double()
        apart = wide.norm(forward - backward) > POOR * wide.norm(best)
        jumps = steep & apart & (wide.norm(best) > STEEP * length)
        if not jumps.any():
            break
        step = torch.where(jumps, step / STEP_SHRINK, step)  # other rows keep theirs
        ahead, behind = wide.beside(w, batch, v, step)
    return best * steep.double() + central * (~steep).double()


def trouble_with_step(
    step: float, objective: AnyObjective, w: Tensor, batch: AnyBatch, v: Tensor
) -> str | None:
    """Why a fixed step is poor here, in a sentence; None if the product is accurate.

    Compares with the automatic step: six gradient evaluations, four of them in float64.
    """
    try:
        reference = double_difference(objective, w, batch, v)
    except InputError:  # does not run in float64: nothing to compare with
        return None
    off = _error(objective, difference(objective, w, batch, v, step), reference)
    if off <= POOR:
        return None
    if _error(objective, double_difference(objective, w, batch, v, step), reference) > POOR:
        cause = "the step is too large: it crosses kinks (ReLU) or strong changes of curvature"
    else:
        cause = f"the step is too small: the difference drowns in the rounding of {w.dtype}"
    return (
        f"fd_step = {step:g} gives Hessian-vector products that are {off:.0%} off; {cause}. "
        'Use fd_step = "auto"'
    )


def trouble_with_product(
    objective: AnyObjective, w: Tensor, batch: AnyBatch, v: Tensor
) -> str | None:
    """Why an exact product is wrong, in a sentence; None if it agrees with a difference."""
    try:
        reference = double_difference(objective, w, batch, v)
    except InputError:  # does not run in float64: nothing to compare with
        return None
    off = _error(objective, objective.hvp(w, batch, v), reference)
    if off <= POOR:
        return None
    return (
        f"the exact Hessian-vector product is {off:.0%} away from a difference of gradients: an "
        "operation of this module has a wrong second derivative in torch (the fused weight_norm "
        "has) or cuts the graph. Use hessian_free curvature, or write that operation differently"
    )


def _error(objective: AnyObjective, product: Tensor, reference: Tensor) -> float:
    """The relative error of a product; 0 if the reference is 0 or non-finite."""
    scale = float(objective.norm(reference).norm())
    if scale == 0 or not math.isfinite(scale):
        return 0.0
    return float(objective.norm(product - reference).norm()) / scale


class Curvature:
    """How the product ∇²f(w, batch)·v is computed, and its cost; here it is taken as zero.

    With a ``part`` v is taken as 0 outside it.
    """

    batches_per_product: ClassVar[int] = 0
    gradients_per_product: ClassVar[int] = 0
    hvps_per_product: ClassVar[int] = 0

    def product(
        self,
        objective: AnyObjective,
        w: Tensor,
        batch: AnyBatch,
        v: Tensor,
        part: Part | None = None,
    ) -> Tensor:
        """∇²f(w, batch)·v, or its approximation."""
        return 0 * v

    def trouble(self, objective: AnyObjective, w: Tensor, batch: AnyBatch, v: Tensor) -> str | None:
        """Why the product is inaccurate here, in a sentence; None if it is accurate."""
        return None


_checked: WeakSet[Objective] = WeakSet()


@dataclass(frozen=True)
class Exact(Curvature):
    """∇²f(w)·v by automatic differentiation (Algorithm 2).

    The first product of every objective is compared with a finite difference, with a warning if
    they disagree; ``check=False`` disables it.
    """

    check: bool = field(default=True, compare=False, repr=False)

    batches_per_product: ClassVar[int] = 1
    gradients_per_product: ClassVar[int] = 0
    hvps_per_product: ClassVar[int] = 1

    def product(
        self,
        objective: AnyObjective,
        w: Tensor,
        batch: AnyBatch,
        v: Tensor,
        part: Part | None = None,
    ) -> Tensor:
        if self.check and objective.base not in _checked:
            _checked.add(objective.base)
            trouble = self.trouble(objective, w, batch, _only(v, part))
            if trouble:
                warnings.warn(trouble, NumericalWarning, stacklevel=2)
        if part is None:
            return objective.hvp(w, batch, v)
        return objective.base.hvp(w, batch, v, part)

    def trouble(self, objective: AnyObjective, w: Tensor, batch: AnyBatch, v: Tensor) -> str | None:
        """Some operations have wrong second derivatives, and some detach the graph."""
        return trouble_with_product(objective, w, batch, v)


@dataclass(frozen=True)
class FirstOrder(Curvature):
    """∇²f(w)·v taken as zero, so that the meta-gradient is ∇f(w_ν) (Algorithm 3)."""


@dataclass(frozen=True)
class HessianFree(Curvature):
    """∇²f(w)·v by a central difference of gradients (Algorithm 4).

    Args:
        fd_step: the paper's δ in w ± δv, a number; or ``"auto"``, which chooses δ per product from
            the norms of w and v and takes the difference in float64
            (:mod:`nufed.meta.curvature` explains why, and the cost). A fixed step is compared
            with the automatic one at products 1, 10, 100, …, with one warning if it is poor;
            ``check=False`` disables it.
    """

    fd_step: float | Literal["auto"] = setting("auto", "δ, finite-difference step", above=0)
    check: bool = field(default=True, compare=False, repr=False)
    batches_per_product: ClassVar[int] = 1
    gradients_per_product: ClassVar[int] = 2
    hvps_per_product: ClassVar[int] = 0
    _watch: _Watch = field(default_factory=lambda: _Watch(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_settings(self)

    def product(
        self,
        objective: AnyObjective,
        w: Tensor,
        batch: AnyBatch,
        v: Tensor,
        part: Part | None = None,
    ) -> Tensor:
        v = _only(v, part)
        if self.fd_step == "auto":
            return double_difference(objective, w, batch, v)
        if self.check and self._watch.due():
            trouble = self.trouble(objective, w, batch, v)
            if trouble:
                self._watch.stop()
                warnings.warn(trouble, NumericalWarning, stacklevel=2)
        return difference(objective, w, batch, v, self.fd_step)

    def trouble(self, objective: AnyObjective, w: Tensor, batch: AnyBatch, v: Tensor) -> str | None:
        if self.fd_step == "auto":
            return None
        return trouble_with_step(self.fd_step, objective, w, batch, v)


CURVATURES: dict[str, type] = {
    "exact": Exact,
    "first_order": FirstOrder,
    "hessian_free": HessianFree,
}


def unchecked(curvature: Curvature) -> Curvature:
    """A copy without checks, for callers of :func:`trouble_with_curvature`."""
    if isinstance(curvature, Exact | HessianFree):
        return replace(curvature, check=False)
    return curvature


def _only(v: Tensor, part: Part | None) -> Tensor:
    """v with zeros outside a part."""
    return v if part is None else part.only(v)


class _Watch:
    """The schedule of checks of a fixed step: products 1, 10, 100, …, until stopped."""

    def __init__(self) -> None:
        self._products = count(1)
        self._next: float = 1

    def due(self) -> bool:
        if next(self._products) < self._next:
            return False
        self._next *= 10
        return True

    def stop(self) -> None:
        self._next = float("inf")


def curvature_along(
    objective: Objective, w: Tensor, batches: Iterable[AnyBatch], most: float = 0.0
) -> float:
    """The largest curvature |gᵀ∇²f·g|/‖g‖² along the gradients g of a short descent from w.

    1/κ is the step size that minimises the loss along such a gradient, if it is quadratic there.
    Every step has the size 1/κ of the largest κ so far, beginning with ``most``.

    >>> import torch
    >>> objective = Objective(torch.nn.Linear(1, 1, bias=False), torch.nn.functional.mse_loss)
    >>> curvature_along(objective, torch.tensor([8.0]), [(torch.ones(1, 1), torch.zeros(1, 1))])
    2.0
    """
    for batch in batches:
        g = objective.grad(w, batch)
        square = float(g @ g)
        if square == 0:
            break
        most = max(most, abs(float(g @ objective.hvp(w, batch, g))) / square)
        if not 0 < most < math.inf:
            break
        w = descend(w, 1 / most, g)
    return most


Operator: TypeAlias = Callable[[Tensor], Tensor]


def spectral_norm(operator: Operator, start: Tensor, iterations: int = 16) -> float:
    """A lower bound on the largest absolute eigenvalue of a symmetric operator, by Lanczos.

    >>> import torch
    >>> matrix = torch.diag(torch.tensor([1.0, -5.0, 2.0], dtype=torch.float64))
    >>> round(spectral_norm(lambda v: matrix @ v, torch.ones(3, dtype=torch.float64)), 6)
    5.0
    """
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside: list[float] = []
    v = start / start.norm()
    for _ in range(min(iterations, start.numel())):
        basis.append(v)
        image = operator(v)
        diagonal.append(float(image @ v))
        for b in (*basis, *basis):  # reorthogonalised twice
            image = image - (image @ b) * b
        length = float(image.norm())
        if length < 1e-12 * (1 + abs(diagonal[0])):
            break
        beside.append(length)
        v = image / length
    beside = beside[: len(diagonal) - 1]
    matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    return float(np.abs(np.linalg.eigvalsh(matrix)).max())
