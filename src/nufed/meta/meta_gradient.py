"""The meta-gradient: one backward recursion, whatever the curvature.

F(w) = f(w_ν) is the loss after ν fine-tuning steps from w. Its gradient is the product (eq. for
∇F_i and its stochastic form, Remark 2)

    ∇F(w) = (I − α∇²f(w₀)) (I − α∇²f(w₁)) ⋯ (I − α∇²f(w_{ν−1})) ∇f(w_ν)

which is evaluated from right to left, one Hessian-vector product at a time. Algorithms 2 (exact), 3
(first-order) and 4 (Hessian-free) differ only in that product (:mod:`nufed.meta.curvature`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nufed.errors import require
from nufed.meta.curvature import Curvature
from nufed.meta.fine_tuning import Rate, at, by_step, descend, descent, trajectory
from nufed.objective import AnyBatch, AnyObjective
from nufed.objective.parts import Part


class MetaBatch(NamedTuple):
    """The independent batches of one meta-gradient.

    ``adapt`` holds 𝒟₀ … 𝒟_{ν−1} (so ν is its length), ``outer`` is 𝒟_ν, ``curvature`` holds
    𝒟′₀ … 𝒟′_{ν−1} (empty for first-order). Passing the adaptation batches as ``curvature``
    gives the gradient of the sampled loop itself, as MAML implementations compute it.
    """

    adapt: Sequence[AnyBatch]
    outer: AnyBatch
    curvature: Sequence[AnyBatch] = ()


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
    in place of α, the transposed Jacobian is I − ∇²f·diag(a): the Hessian is applied to a⊙d. With
    those of each step, a is a_l.

    Args:
        objective, w: the loss and the model.
        batch: the 2ν+1 batches (ν+1 for first-order); ν is ``len(batch.adapt)``, 0 is allowed.
        lr: the step size α of fine-tuning: a number, a vector like w, or one such vector per step.
        curvature: :class:`Exact`, :class:`FirstOrder` or :class:`HessianFree`.
        part: the coordinates that fine-tuning changes, with ``lr`` a number; all by default.

    >>> from nufed import Exact, Objective
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

    The derivative with respect to a step size that several coordinates share is the sum over them;
    with step sizes a_l by step, ∂f(w_ν)/∂a_l is the l-th term, a row of the result.
    No further evaluations are needed; the ν gradients are stored besides the ν iterates. Arguments
    are those of :func:`meta_gradient`.

    >>> from nufed import Exact, Objective
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
    d, shared = next(every), not isinstance(lr, Tensor) or lr.ndim <= w.ndim
    by_rates = [torch.zeros_like(w) for _ in by_step(lr, w)]
    for step, (gradient, _) in reversed(list(enumerate(steps))):
        at(by_rates, step).sub_(gradient * d)
        d = next(every)
    return d, by_rates[0] if shared else torch.stack(by_rates)


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
    _, shape = _scale_and_shape(at(by_step(lr, before), len(batch.adapt) - 1))
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
    rates = [_scale_and_shape(rate) for rate in by_step(lr, d)]
    for step in reversed(range(steps)):
        if batch.curvature:  # first-order needs none
            (scale, shape), w, samples = at(rates, step), iterates.pop(), batch.curvature[step]
            v = d if shape is None else shape * d
            d = descend(d, scale, curvature.product(objective, w, samples, v, part))
        yield d


def _scale_and_shape(lr: Rate) -> tuple[Rate, Tensor | None]:
    """lr as scale·shape, so that a vector of equal rates gives the same bits as a scalar.

    In a stack, every row has its own scale; a scalar has no shape.
    """
    if not isinstance(lr, Tensor) or lr.ndim == 0:
        return lr, None
    scale = lr.abs().amax(dim=-1, keepdim=True)
    return scale, lr / torch.where(scale > 0, scale, 1)
