"""What gMeta knows about its numbers: why an update became non-finite, or may be inaccurate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nufed.algorithms.local_optimizer import Memory
from nufed.algorithms.protocol import AgentContext, Checks, State
from nufed.meta.curvature import HessianFree, spectral_norm, unchecked
from nufed.meta.fine_tuning import Rate, trajectory
from nufed.meta.meta_gradient import MetaBatch, meta_gradient, trouble_with_curvature
from nufed.objective import Objective

if TYPE_CHECKING:
    from nufed.algorithms.gmeta import GMeta


@dataclass(frozen=True)
class GMetaChecks(Checks):
    """What gMeta knows about its numbers."""

    algorithm: GMeta

    def diagnose(self, context: AgentContext, received: State, state: State) -> str | None:
        return _diagnose(self.algorithm, context, received, state)

    def doubt(self, context: AgentContext, received: State) -> str | None:
        """Why the first Hessian-vector product is inaccurate; None if it is accurate."""
        algorithm, objective = self.algorithm, context.objective
        return trouble_with_curvature(
            objective,
            received["model"],
            algorithm.meta_batch(context.batches, 0),
            lr=algorithm.rate(objective, received),
            curvature=algorithm.curvature,
        )

    def without_warnings(self) -> GMeta:
        return self.algorithm.with_settings(curvature=unchecked(self.algorithm.curvature))

    def for_trial(self) -> GMeta:
        """With at most one fine-tuning step, as memory grows by an iterate per step."""
        return self.algorithm.with_settings(adapt_steps=min(1, self.algorithm.adapt_steps))


def _diagnose(algorithm: GMeta, context: AgentContext, received: State, state: State) -> str | None:
    """Where the update became non-finite, found by recomputing it step by step."""
    objective = context.objective.base
    vectors, take_step = received, algorithm.start_steps(context, memory=Memory({**state}))
    for t, meta in enumerate(algorithm.meta_batches(context)):
        where = f"in local update {t + 1}"
        w, lr = vectors["model"], algorithm.rate(objective, vectors)
        for step, point in enumerate(trajectory(objective, w, meta.adapt, lr)):
            if not _finite(point):
                cause = _too_large(algorithm, lr, objective, received["model"], meta)
                return f"{where}, fine-tuning step {step} is not finite{cause}"
        d = meta_gradient(objective, w, meta, lr=lr, curvature=algorithm.curvature)
        if not _finite(d):
            cause = _poor_step(algorithm)
            cause = cause or _too_large(algorithm, lr, objective, received["model"], meta)
            return f"{where}, the meta-gradient is not finite{cause}"
        vectors = algorithm.local_update(objective, vectors, meta, take_step)
        if not _finite(vectors["model"]):
            cause = _too_large(algorithm, lr, objective, received["model"], meta)
            return f"{where}, the step with meta_lr is not finite{cause}"
    return None


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _too_large(algorithm: GMeta, lr: Rate, objective: Objective, w: Tensor, meta: MetaBatch) -> str:
    """Which step size is above 2/L, with L the spectral norm of the Hessian at w on a batch."""
    wide, point = objective.double, w.double()
    start = torch.randn(len(w), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    try:
        largest = spectral_norm(lambda v: wide.hvp(point, meta.outer, v), start)
    except (RuntimeError, TypeError, np.linalg.LinAlgError):  # no second derivatives, no float64
        return ""
    limit = 2 / largest if largest > 0 else float("inf")
    name = "learned adapt_lr" if algorithm.rates_lr else "adapt_lr"
    rates = {
        name: float(torch.as_tensor(lr).max()) if algorithm.adapt_steps else 0,
        "meta_lr": algorithm.meta_lr,
    }
    large = [f"{name} = {rate:g}" for name, rate in rates.items() if rate > limit]
    if not large:
        return ""
    return f": {' and '.join(large)} above 2/L = {limit:.2g}, where L = {largest:.2g} was measured"


def _poor_step(algorithm: GMeta) -> str:
    curvature = algorithm.curvature
    if not isinstance(curvature, HessianFree) or curvature.fd_step == "auto":
        return ""
    return f': fd_step = {curvature.fd_step:g} gives products that are too large; use "auto"'
