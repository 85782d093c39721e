"""Curvature: the three ways in which a Hessian-vector product enters the meta-gradient."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from itertools import count
from typing import ClassVar, Literal, Protocol
from weakref import WeakSet

from torch import Tensor

from nufed.errors import NumericalWarning
from nufed.meta.differences import (
    difference,
    double_difference,
    trouble_with_product,
    trouble_with_step,
)
from nufed.objective import AnyBatch, AnyObjective, Objective
from nufed.objective.parts import Part
from nufed.settings import check_settings, setting


class Curvature(Protocol):
    """How the product ∇²f(w, batch)·v is computed, and its cost.

    With a ``part`` v is taken as 0 outside it.
    """

    batches_per_product: ClassVar[int]
    gradients_per_product: ClassVar[int]
    hvps_per_product: ClassVar[int]

    def product(
        self,
        objective: AnyObjective,
        w: Tensor,
        batch: AnyBatch,
        v: Tensor,
        part: Part | None = None,
    ) -> Tensor:
        """∇²f(w, batch)·v, or its approximation."""
        ...

    def trouble(self, objective: AnyObjective, w: Tensor, batch: AnyBatch, v: Tensor) -> str | None:
        """Why the product is inaccurate here, in a sentence; None if it is accurate."""
        ...


_checked: WeakSet[Objective] = WeakSet()


@dataclass(frozen=True)
class Exact:
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
class FirstOrder:
    """∇²f(w)·v taken as zero, so that the meta-gradient is ∇f(w_ν) (Algorithm 3)."""

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
        return 0 * v

    def trouble(self, objective: AnyObjective, w: Tensor, batch: AnyBatch, v: Tensor) -> str | None:
        return None


@dataclass(frozen=True)
class HessianFree:
    """∇²f(w)·v by a central difference of gradients (Algorithm 4).

    Args:
        fd_step: the paper's δ in w ± δv, a number; or ``"auto"``, which chooses δ per product from
            the norms of w and v and takes the difference in float64
            (:mod:`nufed.meta.differences` explains why, and the cost). A fixed step is compared
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
