"""The meta-gradient: one backward recursion, and the three ways curvature enters it.

F(w) = f(w_ν) is the loss after ν fine-tuning steps from w. Its gradient is the product (eq. for
∇F_i and its stochastic form, Remark 2)

    ∇F(w) = (I − α∇²f(w₀)) (I − α∇²f(w₁)) ⋯ (I − α∇²f(w_{ν−1})) ∇f(w_ν)

which is evaluated from right to left, one Hessian-vector product at a time. Algorithms 2 (exact), 3
(first-order) and 4 (Hessian-free) differ only in that product.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import ClassVar, Literal, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from nufed.errors import NumericalWarning, require
from nufed.meta.differences import (
    difference,
    double_difference,
    trouble_with_product,
    trouble_with_step,
)
from nufed.meta.fine_tuning import Rate, descend_in_place, descent, trajectory
from nufed.objective import AnyBatch, AnyObjective, Objective
from nufed.objective.parts import Part
from nufed.settings import check_settings, setting


class MetaBatch(NamedTuple):
    """The independent batches of one meta-gradient.

    ``adapt`` holds 𝒟₀ … 𝒟_{ν−1} (so ν is its length), ``outer`` is 𝒟_ν, ``curvature`` holds
    𝒟′₀ … 𝒟′_{ν−1} (empty for first-order). Passing the adaptation batches as ``curvature``
    gives the gradient of the sampled loop itself, as MAML implementations compute it.
    """

    adapt: Sequence[AnyBatch]
    outer: AnyBatch
    curvature: Sequence[AnyBatch] = ()


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


def meta_gradient(
    objective: AnyObjective,
    w: Tensor,
    batch: MetaBatch,
    *,
    lr: Rate,
    curvature: Curvature,
    part: Part | None = None,
) -> Tensor:
    """The stochastic gradient of f(w_ν) with respect to w, for any ν (lines 1-8 of Algorithm 2).

        w₀ = w;  w_{l+1} = w_l − α∇f(w_l, 𝒟_l)
        d ← ∇f(w_ν, 𝒟_ν);  for l = ν−1 … 0:  d ← d − α∇²f(w_l, 𝒟′_l)·d

    It stores ν iterates (first-order: none) and no graph. With step sizes per coordinate, diag(a)
    in place of α, the transposed Jacobian is I − ∇²f·diag(a): the Hessian is applied to a⊙d.

    Args:
        objective, w: the loss and the model.
        batch: the 2ν+1 batches (ν+1 for first-order); ν is ``len(batch.adapt)``, 0 is allowed.
        lr: the step size α of fine-tuning, a number or a vector like w.
        curvature: :class:`Exact`, :class:`FirstOrder` or :class:`HessianFree`.
        part: the coordinates that fine-tuning changes, with ``lr`` a number; all by default.

    >>> import torch
    >>> objective = Objective(torch.nn.Linear(1, 1, bias=False), torch.nn.functional.mse_loss)
    >>> x = (torch.ones(1, 1), torch.zeros(1, 1))          # f(w) = w², ∇²f = 2
    >>> batch = MetaBatch(adapt=[x, x], outer=x, curvature=[x, x])
    >>> meta_gradient(objective, torch.tensor([8.0]), batch, lr=0.25, curvature=Exact())
    tensor([1.])
    """
    steps = trajectory(objective, w, batch.adapt, lr, part)
    iterates = list(steps) if batch.curvature else list(deque(steps, maxlen=1))
    every = _backwards(objective, iterates, batch, lr, curvature, part)
    (d,) = deque(every, maxlen=1)  # the last
    return d


def meta_gradient_with_rates(
    objective: AnyObjective, w: Tensor, batch: MetaBatch, *, lr: Rate, curvature: Curvature
) -> tuple[Tensor, Tensor]:
    """The meta-gradient, and the gradient of f(w_ν) with respect to step sizes per coordinate.

    With w_{l+1} = w_l − a⊙∇f(w_l, 𝒟_l), and d_ν = ∇f(w_ν, 𝒟_ν), …, d₀ the successive values of d in
    :func:`meta_gradient`,

        ∂f(w_ν)/∂a = −Σ_l ∇f(w_l, 𝒟_l) ⊙ d_{l+1}.

    The derivative with respect to a step size that several coordinates share is the sum over them.
    No further evaluations are needed; the ν gradients are stored besides the ν iterates. Arguments
    are those of :func:`meta_gradient`.

    >>> objective = Objective(torch.nn.Linear(1, 1, bias=False), torch.nn.functional.mse_loss)
    >>> x = (torch.ones(1, 1), torch.zeros(1, 1))          # f(w_1) = (w − 2αw)²
    >>> batch = MetaBatch(adapt=[x], outer=x, curvature=[x])
    >>> meta_gradient_with_rates(
    ...     objective, torch.tensor([8.0]), batch, lr=0.25, curvature=Exact()
    ... )
    (tensor([4.]), tensor([-128.]))
    """
    steps = list(descent(objective, w, batch.adapt, lr))
    every = _backwards(objective, [w, *(after for _, after in steps)], batch, lr, curvature)
    d, by_rates = next(every), torch.zeros_like(w)
    for gradient, _ in reversed(steps):
        by_rates = by_rates - gradient * d
        d = next(every)
    return d, by_rates


def trouble_with_curvature(
    objective: AnyObjective, w: Tensor, batch: MetaBatch, *, lr: Rate, curvature: Curvature
) -> str | None:
    """Why the first product of a meta-gradient is inaccurate; None if it is accurate.

    Arguments are those of :func:`meta_gradient`.
    """
    if not batch.curvature:
        return None
    before, last = deque(trajectory(objective, w, batch.adapt, lr), maxlen=2)
    d = objective.grad(last, batch.outer)
    del last
    _, shape = _scale_and_shape(lr)
    v = d if shape is None else shape * d
    return curvature.trouble(objective, before, batch.curvature[-1], v)


def _backwards(
    objective: AnyObjective,
    iterates: list[Tensor],
    batch: MetaBatch,
    lr: Rate,
    curvature: Curvature,
    part: Part | None = None,
) -> Iterator[Tensor]:
    """d_ν, d_{ν−1}, …, d₀, from the iterates w₀ … w_ν, each of which is freed after its use."""
    steps = len(batch.adapt)
    require(
        len(batch.curvature) in (steps, steps * curvature.batches_per_product),
        "len(batch.curvature)",
        len(batch.curvature),
        f"{type(curvature).__name__} needs one curvature batch per adaptation step, {steps}",
    )
    d = objective.grad(iterates.pop(), batch.outer)
    yield d
    scale, shape = _scale_and_shape(lr)
    for step in reversed(range(steps)):
        if batch.curvature:  # first-order needs none
            w, own = iterates.pop(), batch.curvature[step]
            v = d if shape is None else shape * d
            d = descend_in_place(d, scale, curvature.product(objective, w, own, v, part))
        yield d


def _only(v: Tensor, part: Part | None) -> Tensor:
    """v with zeros outside a part."""
    return v if part is None else part.only(v)


def _scale_and_shape(lr: Rate) -> tuple[Rate, Tensor | None]:
    """lr as scale·shape, so that a vector of equal rates gives the same bits as a scalar.

    In a stack, every row has its own scale; a scalar has no shape.
    """
    if not isinstance(lr, Tensor) or lr.ndim == 0:
        return lr, None
    scale = lr.abs().amax(dim=-1, keepdim=True)
    return scale, lr / torch.where(scale > 0, scale, 1)


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
