"""Generalized meta federated averaging (Algorithm 1) with the local updates 2, 3 and 4.

The agents train one model w to be good after ν fine-tuning steps on each agent's own data:

    min_w  (1/N) Σ_i f_i(w^i_ν),   w^i_0 = w,   w^i_{l+1} = w^i_l − α∇f_i(w^i_l).

ν = 0 is FedAvg and ν = 1 is Per-FedAvg.

Beyond the paper, step sizes may be learned along with the model:

    min_{w, θ}  (1/N) Σ_i f_i(w^i_ν),   w^i_{l+1} = w^i_l − a_l⊙∇f_i(w^i_l),   a = E exp(θ),

with E the expansion of the numbers that ``rates`` asks for to a vector like w for every step:

    tensor       one number per parameter tensor, the same in every step
    coordinate   one per coordinate, the same in every step (Meta-SGD, Li et al. 2017; it sends
                 twice as much as gMeta)
    step         one per tensor and step (MAML++, Antoniou et al. 2019); fine-tuning beyond ν steps
                 takes those of the last

The logarithms θ are trained, sent and aggregated: rates stay positive whatever an agent sends, the
mean of θ is the geometric mean of rates, and a step changes a rate in proportion to its value,
whatever its order of magnitude. Each local update changes both, on the same batches:

    w ← w − β·d₀,   θ ← θ − rates_lr·Eᵀ(a⊙∂f(w_ν)/∂a),   ∂f(w_ν)/∂a_l = −∇f(w_l)⊙d_{l+1},

summed over l where steps share a. An agent keeps nothing. It sends w and θ, which tells the server
also how steep its loss is, by tensor or coordinate; secure aggregation sums both. The papers train
a itself, with the step size of w: a may become negative in Meta-SGD. MAML++ also has losses of all
steps and an annealed first order, which are not implemented.

Known mistakes elsewhere: a meta-gradient that is silently first-order because the graph is detached
between the fine-tuning steps and the outer gradient; fine-tuning on the test samples that are then
evaluated; learned step sizes that no gradient reached (learnables/learn2learn#167). The tests also
reject: one batch for all terms, where the paper has independent ones; the outer gradient at w
instead of w_ν; a Hessian at w_ν instead of w_l; fine-tuning steps of size β; the gradients of step
sizes of another step, or summed over steps, or without the factor a.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from nufed.algorithms.aggregation import Mean
from nufed.algorithms.local_optimizer import SGD, Memory
from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    Algorithm,
    BatchSource,
    Checks,
    Cost,
    Draw,
    Notes,
    Pool,
    State,
    TheorySettings,
)
from nufed.algorithms.server_optimizer import Plain
from nufed.errors import require
from nufed.meta.curvature import (
    CURVATURES,
    Curvature,
    Exact,
    FirstOrder,
    HessianFree,
    spectral_norm,
    unchecked,
)
from nufed.meta.fine_tuning import Rate, descend, per_coordinate, per_tensor, trajectory
from nufed.meta.meta_gradient import (
    MetaBatch,
    meta_gradient,
    meta_gradient_with_rates,
    trouble_with_curvature,
)
from nufed.objective import AnyObjective, Batch, Objective
from nufed.objective.parts import Part
from nufed.settings import setting


@dataclass(frozen=True)
class GMeta(LocalTraining):
    """Generalized meta federated averaging (Algorithm 1 of the paper), for any ν.

    Args:
        adapt_steps: ν, the fine-tuning steps that the model is trained for.
        curvature: how the Hessian enters: ``Exact()``, ``FirstOrder()`` or ``HessianFree()``.
        rates: what has a step size of its own, where step sizes are learned.
        rates_lr: the step size of learned step sizes, whose initial value is ``adapt_lr``; 0: they
            are fixed. It acts on logarithms: on the digits data 0.1 is stable, 0.5 diverges.
        outer_samples: what outer batches are drawn from. ``"independent"``: the whole training
            part, as the paper; with as many samples as a batch they are then the inner ones.
            ``"resampled"``: the same, with replacement. ``"disjoint"``: the training part is halved
            at random in every local update; inner batches come from one half, outer ones from the
            other, and none is larger than a half.
        inner_batches: ``"one"``: all ν steps of a local update and their Hessians share one batch,
            whose sampled loop is then differentiated exactly, as implementations of MAML do.
        others: as for :class:`LocalTraining`; ``adapt_lr`` (α) may be a vector like w, and
            ``optimizer`` takes the meta-gradient as its gradient.

    Fine-tuning at use draws from the whole training part whatever these two say.
    """

    adapt_steps: int = setting(1, "ν, fine-tuning steps the model is trained for", least=0)
    curvature: Curvature = setting(Exact(), "how the Hessian enters", choices=CURVATURES)
    rates_lr: float = setting(0.0, "step size of learned step sizes; 0: they are fixed", least=0)
    rates: Literal["tensor", "coordinate", "step"] = setting(
        "tensor", "learned step sizes: one per tensor, per coordinate, or per step and tensor"
    )
    outer_samples: Literal["independent", "resampled", "disjoint"] = setting(
        "independent",
        "outer samples: drawn independently of the inner ones, with replacement, or from the "
        "other half of the training part",
    )
    inner_batches: Literal["independent", "one"] = setting(
        "independent",
        "batches of the ν inner steps: independent, or one for all and their Hessians",
    )

    kept_loops: ClassVar[tuple[str, ...]] = ("local",)
    notes: ClassVar[Notes] = Notes(
        newcomer="fine-tunes the global model",
        optimized="the local updates, with the meta-gradient as gradient",
        theory=lambda algorithm: _theory(algorithm),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = tuple(self.adapt_lr.shape) if isinstance(self.adapt_lr, Tensor) else ()
        require(len(shape) < 2, "adapt_lr", shape, "must be a number or a vector like w")
        if self.rates_lr:
            number = not isinstance(self.adapt_lr, Tensor) and self.adapt_lr > 0
            allowed = "where step sizes are learned it must be a number above 0 to start from"
            require(number, "adapt_lr", self.adapt_lr, allowed)
            allowed = "with adapt_steps = 0 there is no step size to learn; set it to 0"
            require(self.adapt_steps > 0, "rates_lr", self.rates_lr, allowed)
        shared = not self.local_epochs or self.outer_samples == "independent"
        allowed = 'with local_epochs outer batches are those of epochs; set it to "independent"'
        require(shared, "outer_samples", self.outer_samples, allowed)

    @property
    def receives(self) -> tuple[str, ...]:
        return ("model", "log_rates") if self.rates_lr else ("model",)

    sends = receives

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        if not self.rates_lr:
            return {"model": w}
        tensors, nu = len(objective.base.sizes), self.adapt_steps
        numbers = {"tensor": tensors, "coordinate": w.numel(), "step": nu * tensors}
        rates = w.new_full((numbers[self.rates],), float(self.adapt_lr))
        return {"model": w, "log_rates": rates.log()}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        vectors, state = received, {**state}
        step = self.start_steps(context, memory=Memory(state))
        for batch in self.meta_batches(context):
            vectors = self.local_update(context.objective, vectors, batch, step)
        return AgentResult(vectors, state, self._cost(self.steps_per_round(context)))

    def local_update(
        self, objective: AnyObjective, vectors: State, batch: MetaBatch, step: Callable[..., Tensor]
    ) -> State:
        """The model, and the logarithms of rates if they are learned, after one local update."""
        w, curvature = vectors["model"], self.curvature
        if not self.rates_lr:
            part = self.tuned_part(objective)
            lr = self.rate(objective, vectors) if part is None else self.adapt_lr
            d = meta_gradient(objective, w, batch, lr=lr, curvature=curvature, part=part)
            return {"model": step(w, d, batch.outer)}
        lr = self.rate(objective, vectors)
        d, by_rates = meta_gradient_with_rates(objective, w, batch, lr=lr, curvature=curvature)
        by_logs = self.collected(objective, lr * by_rates)
        return {
            "model": step(w, d, batch.outer),
            "log_rates": descend(vectors["log_rates"], self.rates_lr, by_logs),
        }

    def meta_batches(self, context: AgentContext) -> Iterator[MetaBatch]:
        """The batches of every local update of a round."""
        if self.local_epochs:
            for t, outer in enumerate(self.local_batches(context)):
                yield self.meta_batch(context.batches, t, outer)
        else:
            for t in range(self.local_steps):
                yield self.meta_batch(context.batches, t)

    def meta_batch(self, batches: BatchSource, t: int, outer: Batch | None = None) -> MetaBatch:
        """The 2ν+1 batches of local update t (ν+1 for first-order)."""
        adapt, curvature = (batches.draw(*draw) for draw in self._inner_draws(t))
        if outer is None:
            (outer,) = batches.draw(*self._outer_draw(t))
        if self.inner_batches == "one" and adapt:
            nu = self.adapt_steps
            return MetaBatch(adapt * nu, outer, adapt * nu * self.curvature.batches_per_product)
        return MetaBatch(adapt, outer, curvature)

    def rate(self, objective: AnyObjective, received: State) -> Rate:
        """The step size of fine-tuning: as given, or as learned so far."""
        if not self.rates_lr:
            return self.adapt_lr
        return self.expanded(objective, received["log_rates"].exp())

    def expanded(self, objective: AnyObjective, numbers: Tensor) -> Tensor:
        """E·numbers: a vector like w, or one for each step."""
        if self.rates == "coordinate":
            return numbers
        if self.rates == "step":
            numbers = torch.stack(numbers.chunk(self.adapt_steps, dim=-1))
        return per_coordinate(numbers, objective.base.sizes)

    def collected(self, objective: AnyObjective, vectors: Tensor) -> Tensor:
        """Eᵀ·vectors."""
        if self.rates == "coordinate":
            return vectors
        sums = per_tensor(vectors, objective.base.sizes)
        return torch.cat(sums.unbind(), dim=-1) if self.rates == "step" else sums

    def tuned_part(self, objective: AnyObjective) -> Part | None:
        """The coordinates that take steps of size ``adapt_lr``; None: all, as :meth:`rate` says."""
        return None

    @property
    def combines(self) -> Literal["elementwise", "linearly"] | None:
        vector = self.rates_lr or isinstance(self.adapt_lr, Tensor)
        return super().combines if vector else self.combines_linearly

    def update_draws(self) -> list[Draw]:
        draws: list[Draw] = []
        for outer in super().update_draws():
            adapt, curvature = self._inner_draws(outer.step)
            draws += [adapt, self._outer_draw(outer.step), curvature]
        return draws

    def _inner_draws(self, t: int) -> tuple[Draw, Draw]:
        nu, size, products = self.adapt_steps, self.batch_size, self.curvature.batches_per_product
        if self.inner_batches == "one":
            nu, products = min(1, nu), 0
        pool: Pool = "support" if self.outer_samples == "disjoint" else "all"
        return Draw("adapt", size, nu, t, pool), Draw("curvature", size, nu * products, t, pool)

    def _outer_draw(self, t: int) -> Draw:
        pools: dict[str, Pool] = {"resampled": "resampled", "disjoint": "query"}
        pool: Pool = pools.get(self.outer_samples, "all") if self.adapt_steps else "all"
        return Draw("outer", self.batch_size, 1, t, pool)

    def _cost(self, tau: int) -> Cost:
        """The cost of τ local updates."""
        nu, curvature = self.adapt_steps, self.curvature
        return Cost(
            gradients=tau * (nu + 1 + nu * curvature.gradients_per_product),
            hvps=tau * nu * curvature.hvps_per_product,
        )

    @property
    def checks(self) -> GMetaChecks:
        return GMetaChecks(self)

    def with_settings(self, **settings: Any) -> GMeta:
        """A copy with other settings, also with those that a subclass fixes."""
        same = copy.copy(self)  # not replace(): subclasses fix some settings, as FedAvg does
        vars(same).update(settings)
        return same


@dataclass(frozen=True)
class FedAvg(GMeta):
    """FedAvg: agents train, the server averages; ν = 0, and with fine-tuning FedAvg + FT.

    Every agent of the cohort takes τ local steps from the received model, and the server averages
    the results:

        y_i ← w;  τ times:  y_i ← y_i − β∇f_i(y_i),      w ← mean of y_i.

    It minimises (1/N) Σ_i f_i(w), the loss *before* fine-tuning: gMeta with ν = 0. The global model
    is w. The personal model is w after plain steps of size α = ``adapt_lr`` on the agent's own
    samples, which training does not depend on; a newcomer does the same. With several local steps
    it is close to Reptile, and fine-tunes well without having been trained for it. The paper
    weights agents by their samples (``averaging = "samples"``).

    Known mistakes elsewhere: FedAvg before fine-tuning is compared with other methods after it;
    FedAvg is fine-tuned with the step size that suits another method; fine-tuning on the test
    samples that are then evaluated.
    """

    notes: ClassVar[Notes] = replace(
        GMeta.notes, averaging="samples", optimized="the local updates"
    )

    adapt_steps: int = field(default=0, init=False)
    curvature: Curvature = field(default=FirstOrder(), init=False)
    rates_lr: float = field(default=0.0, init=False)
    rates: Literal["tensor"] = field(default="tensor", init=False)
    outer_samples: Literal["independent"] = field(default="independent", init=False)
    inner_batches: Literal["independent"] = field(default="independent", init=False)


@dataclass(frozen=True)
class PerFedAvg(GMeta):
    """Per-FedAvg: ν = 1, one fine-tuning step in training.

    The model is trained to be good after one step on an agent's own data, gMeta with ν = 1:

        min_w  (1/N) Σ_i f_i(w − α∇f_i(w)),
        d ← (I − α∇²f_i(w, 𝒟'))·∇f_i(w − α∇f_i(w, 𝒟), 𝒟''),   w ← w − β·d,

    with three independent batches. ``curvature`` says how the Hessian enters: ``exact``,
    ``first_order`` (as if it were 0) or ``hessian_free`` (a difference of gradients). The paper has
    the last two, as FO and HF. Agents keep nothing; the personal model is w after fine-tuning, and
    a newcomer does the same. Learned step sizes are as in :mod:`nufed.algorithms.gmeta`.
    """

    adapt_steps: int = field(default=1, init=False)


def _theory(algorithm: GMeta) -> TheorySettings | None:
    plain = algorithm.optimizer == SGD() and not algorithm.local_epochs
    plain = plain and isinstance(algorithm.server_optimizer, Plain)
    independent = algorithm.outer_samples == algorithm.inner_batches == "independent"
    plain = plain and (independent or not algorithm.adapt_steps)
    if algorithm.rates_lr or isinstance(algorithm.adapt_lr, Tensor) or not plain:
        return None
    curvature = algorithm.curvature
    kind: Any = next(name for name, each in CURVATURES.items() if isinstance(curvature, each))
    return TheorySettings(
        algorithm.adapt_steps,
        algorithm.adapt_lr,
        algorithm.meta_lr,
        algorithm.local_steps,
        algorithm.batch_size,
        kind,
        curvature.fd_step if isinstance(curvature, HessianFree) else "auto",
        uniform=algorithm.aggregation == Mean(),
    )


def local_sgd(like: Algorithm) -> GMeta:
    """SGD with the settings that it shares with another algorithm, for the null baseline."""
    shared = ("adapt_lr", "meta_lr", "batch_size", "local_steps", "local_epochs", "optimizer")
    settings = {name: getattr(like, name) for name in shared if hasattr(like, name)}
    optimizer = settings.pop("optimizer", None)
    if isinstance(optimizer, SGD):  # one loop over all steps keeps no state
        settings["optimizer"] = replace(optimizer, optimizer_state="fresh")
    return GMeta(adapt_steps=0, curvature=FirstOrder(), **settings)


@dataclass(frozen=True)
class GMetaChecks(Checks):
    """Why an update of gMeta became non-finite, or may be inaccurate."""

    algorithm: GMeta

    def diagnose(self, context: AgentContext, received: State, state: State) -> str | None:
        """Where the update became non-finite, found by recomputing it step by step."""
        algorithm, objective = self.algorithm, context.objective.base
        vectors, take_step = received, algorithm.start_steps(context, memory=Memory({**state}))
        for t, meta in enumerate(algorithm.meta_batches(context)):
            where = f"in local update {t + 1}"
            w, lr = vectors["model"], algorithm.rate(objective, vectors)
            for step, point in enumerate(trajectory(objective, w, meta.adapt, lr)):
                if not _finite(point):
                    cause = self._too_large(lr, objective, received["model"], meta)
                    return f"{where}, fine-tuning step {step} is not finite{cause}"
            d = meta_gradient(objective, w, meta, lr=lr, curvature=algorithm.curvature)
            if not _finite(d):
                cause = self._poor_step() or self._too_large(lr, objective, received["model"], meta)
                return f"{where}, the meta-gradient is not finite{cause}"
            vectors = algorithm.local_update(objective, vectors, meta, take_step)
            if not _finite(vectors["model"]):
                cause = self._too_large(lr, objective, received["model"], meta)
                return f"{where}, the step with meta_lr is not finite{cause}"
        return None

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

    def _too_large(self, lr: Rate, objective: Objective, w: Tensor, meta: MetaBatch) -> str:
        """Which step size is above 2/L, with L the spectral norm of the Hessian at w on a batch."""
        wide, point = objective.double, w.double()
        start = torch.randn(len(w), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        try:
            largest = spectral_norm(lambda v: wide.hvp(point, meta.outer, v), start)
        except (RuntimeError, TypeError, np.linalg.LinAlgError):  # no second derivatives or float64
            return ""
        limit = 2 / largest if largest > 0 else float("inf")
        adapt_lr = float(torch.as_tensor(lr).max()) if self.algorithm.adapt_steps else 0
        name = "learned adapt_lr" if self.algorithm.rates_lr else "adapt_lr"
        rates = {name: adapt_lr, "meta_lr": self.algorithm.meta_lr}
        large = [f"{name} = {rate:g}" for name, rate in rates.items() if rate > limit]
        if not large:
            return ""
        above = f"above 2/L = {limit:.2g}, where L = {largest:.2g} was measured"
        return f": {' and '.join(large)} {above}"

    def _poor_step(self) -> str:
        curvature = self.algorithm.curvature
        if not isinstance(curvature, HessianFree) or curvature.fd_step == "auto":
            return ""
        return f': fd_step = {curvature.fd_step:g} gives products that are too large; use "auto"'


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


gmeta, fedavg, per_fedavg = GMeta, FedAvg, PerFedAvg
