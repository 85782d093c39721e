"""Hessian-vector products from two gradients: the difference, its step, and a check of that step.

The step δ of (∇f(w+δv) − ∇f(w−δv)) / 2δ is caught between two errors. A large step crosses the
kinks of ReLU units, and the difference then measures jumps instead of curvature; a small one drowns
in rounding. In float32 there may be no room between them: on the paper's network a usual δ = 10⁻³
is worse than leaving curvature out. In float64 there is plenty: with w ± δv about 10⁻⁸ apart
(relative to w), crossings are rare and rounding costs about eight of sixteen digits. So the
automatic step evaluates its two gradients in float64, at about twice the time and memory of float32
gradients of compute-bound models, and nothing for models dominated by per-operation overhead.

Rare is not never, and what a crossing adds is a jump of the gradient divided by a tiny step: one of
them can undo a whole training (on CIFAR one product in 250 is 10⁵ times too long). So where a
product is much longer than v, differences are taken between w + δv and w + 2δv and on the other
side, which a kink at w does not touch, and the one on w's side of the kink is used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nufed.errors import InputError
from nufed.objective import AnyBatch, AnyObjective

RELATIVE_STEP = math.sqrt(torch.finfo(torch.float64).eps)
STEEP = 100  # ‖∇²f·v‖/‖v‖ from which a product is taken again; on the paper's network it is 5 to 20
SMALLER, TURNS = 16, 4  # how much smaller the step is then, and how often
POOR = 0.1  # relative error of a product from which a fixed step is called poor


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

    ``step=None`` takes δ = √ε·(1 + ‖w‖)/‖v‖ with ε the precision of float64, for every row of a
    stack its own, and stays on one side of kinks.
    """
    try:
        if step is None:
            wide = _without_kinks(objective, w, batch, v)
        else:
            wide = difference(objective.double, w, batch, v, step)
    except (RuntimeError, TypeError) as error:
        objective.grad(w, batch)  # if this fails too, it is not about float64
        raise InputError(
            'fd_step = "auto" evaluates gradients in float64, which this module or loss does not '
            f"take ({error}); let it create its tensors in the dtype of its inputs, or give "
            "fd_step as a number, or use exact curvature"
        ) from error
    return wide.to(w.dtype)


def _without_kinks(objective: AnyObjective, w: Tensor, batch: AnyBatch, v: Tensor) -> Tensor:
    """The central difference, or where the gradient seems to jump a difference beside it."""
    wide, length = objective.double, objective.norm(v).double()
    step = RELATIVE_STEP * (1 + objective.norm(w).double()) / torch.where(length > 0, length, 1)
    ahead, behind = wide.beside(w, batch, v, step)
    central = (ahead - behind) / (2 * step)
    steep = wide.norm(central) > STEEP * length
    if not steep.any():
        return central
    middle, _ = wide.beside(w, batch, v, 0 * step)
    for _ in range(TURNS):
        far_ahead, far_behind = wide.beside(w, batch, v, 2 * step)
        forward, backward = (far_ahead - ahead) / step, (behind - far_behind) / step
        onwards = wide.norm(ahead - middle) < wide.norm(middle - behind)  # the kink is behind w
        best = forward * onwards.double() + backward * (~onwards).double()
        apart = wide.norm(forward - backward) > POOR * wide.norm(best)
        jumps = steep & apart & (wide.norm(best) > STEEP * length)
        if not jumps.any():
            break
        step = torch.where(jumps, step / SMALLER, step)  # the same bits for the other rows
        ahead, behind = wide.beside(w, batch, v, step)
    return best * steep.double() + central * (~steep).double()


def trouble_with_step(
    step: float, objective: AnyObjective, w: Tensor, batch: AnyBatch, v: Tensor
) -> str | None:
    """What is wrong with a fixed step here, as a sentence; None if the product is good.

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
    """What is wrong with an exact product, as a sentence; None if it agrees with a difference."""
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
    """The relative error of a product; none where there is nothing to compare with."""
    scale = float(objective.norm(reference).norm())
    if scale == 0 or not math.isfinite(scale):
        return 0.0
    return float(objective.norm(product - reference).norm()) / scale
