"""FedL2P: meta-nets learn a fine-tuning strategy for each agent (Lee et al., 2023).

In the first ``pretrain_rounds`` rounds the global model w is trained as by FedAvg. Then w is fixed,
and meta-nets with parameters λ are learned. From statistics
of the inputs of every layer under w they give an agent a step size η for each parameter tensor and,
where batch-norm layers have tracked statistics s, a weight β of its own statistics s_i:

    min_λ Σ_i L_V(θ_i, λ),   θ_i: K steps θ ← θ − η⊙∇L_T(θ) from w, with s ← (1 − β)s + β·s_i.

L_T and L_V are losses on disjoint parts of the agent's training data, redrawn in every round. θ_i
is treated as a fixed point of its steps. With v = ∇L_V(θ_i), g = ∇L_T(θ_i) and H = ∇²L_T(θ_i), the
implicit function theorem and a Neumann series give the hypergradient

    u = Σ_{q = 0…Q} (I − H·diag η)^q v,
    dL_V/dη = −u⊙g (summed over each tensor),   dL_V/dβ = ∂L_V/∂β − (η⊙u)ᵀ∂²L_T/∂θ∂β.

η⊙u tends to H⁻¹v as Q grows, so that dL_V/dβ is the paper's ∂L_V/∂λ − ∂L_V/∂θ·H⁻¹·∂²L_T/∂θ∂λ; L_T
does not depend on η, so for η the theorem is applied to the steps. The series converges where the
steps do. At a minimum of L_T both are 0 unless layers are frozen (η = 0): λ is learned from the
gradient that remains after K steps. Each agent takes τ steps λ ← λ − ζ·hypergradient (clamped).

The server keeps w, λ and the mean of the last cohort's η, and sends all three. Agents send back w
in the first phase, λ and η in the second, and keep nothing. The personal model is w with mixed
statistics, fine-tuned by steps of size η, which ``scale`` multiplies. A newcomer does the same, as
it needs only its own data. A bundle holds no meta-nets, but w and the server's mean of η. The
optimiser drives the steps of w and of λ; fine-tuning takes plain steps.

The authors' code mixes statistics of batches in training and their running means at evaluation;
here s_i are those of the agent's whole data under w, fixed during fine-tuning, in evaluation mode.
Its Neumann series has a separate step size ψ in place of η.

Known mistakes elsewhere: the authors' code takes ∂²L_T/∂θ∂η through the last step's θ(η) and has no
direct term for η, which gives −vᵀH⁻¹H·∂θ/∂η = +v⊙g where −v⊙g is the derivative: step sizes shrink
where longer steps lower L_V. It leaves out the factor ψ of H⁻¹ ≈ ψΣ(I − ψH)^q; with its ψ = 0.1 the
implicit term of dL_V/dβ is ten times too large relative to the direct one. Another published
adaptation trains w along with λ, differentiates one step from w, and takes β from a fixed rule.

The meta-nets of FedL2P: their inputs, outputs and derivatives.

Both are perceptrons with two hidden layers of ReLUs (Lee et al., 2023). Under the global model w,

    LRNet: (E x_1, SD x_1, …, E x_L, SD x_L) ↦ η = η̃⊙clamp(·, 0, η_max)      one per tensor of w
    BNNet: (ξ_1, …, ξ_B) ↦ β = clamp(·, 0, 1)                     one per batch-norm layer

with x_l the inputs of layer l on the agent's data, η̃ learned multipliers, and ξ_b the symmetric
Kullback-Leibler divergence between the layer's statistics s = (μ, σ²) in w and those of its inputs,
s_i, as diagonal normal distributions, averaged over channels. The derivative of a clamp is taken as
1 (straight-through). The agent normalises by (1 − β)s + β·s_i.

λ, one flat vector, holds LRNet, η̃ and BNNet. BNNet exists if the model has batch-norm layers with
scale, shift and tracked statistics (``running_stats="tracked"``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import ClassVar, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import (
    Adaptation,
    AgentContext,
    AgentResult,
    Cost,
    Notes,
    Personal,
    Places,
    State,
)
from nufed.errors import require
from nufed.meta.fine_tuning import Rate, adapt, per_coordinate, per_tensor, trajectory
from nufed.objective import AnyObjective, Batch, Inputs, Objective
from nufed.objective.parts import Part
from nufed.seeding import stream, torch_seed
from nufed.settings import Search, setting


@dataclass(frozen=True)
class FedL2P(LocalTraining):
    """FedL2P: meta-nets give every agent step sizes and norm statistics (Lee et al., 2023).

    Args:
        pretrain_rounds: rounds of FedAvg before λ is learned and w is fixed.
        adapt_steps: K, fine-tuning steps that λ is learned for.
        neumann_steps: Q, terms of the Neumann series beyond the first.
        net_lr: ζ, the step size of the meta-nets.
        base_lr: the step size of η̃.
        clamp: the largest absolute value of a hypergradient's coordinate; 0: any.
        most_rate: η_max.
        net_width: units in each of a meta-net's two hidden layers.
        hold_out: the share of an agent's training data that L_V uses.
        others: as for :class:`LocalTraining`; ``meta_lr`` is FedAvg's, ``local_steps`` is τ in both
            phases, and ``adapt_lr``, a number, is the initial η̃.
    """

    pretrain_rounds: int = setting(
        10, "rounds of FedAvg before λ is learned", least=0, of_rounds=2 / 3
    )
    adapt_steps: int = setting(4, "K, fine-tuning steps that λ is learned for", least=1)
    neumann_steps: int = setting(3, "Q, terms of the Neumann series beyond the first", least=0)
    net_lr: float = setting(
        0.001, "ζ, step size of the meta-nets", least=0, search=Search(1e-4, 0.1)
    )
    base_lr: float = setting(0.0001, "step size of η̃, the multipliers of step sizes", least=0)
    clamp: float = setting(1.0, "largest coordinate of a hypergradient; 0: any", least=0)
    most_rate: float = setting(1000.0, "η_max, largest output of LRNet", above=0)
    net_width: int = setting(100, "units in each hidden layer of a meta-net", least=1)
    hold_out: float = setting(0.2, "share of training data that L_V uses", above=0, below=1)

    receives: ClassVar[tuple[str, ...]] = ("model", "meta_net", "rates")
    sends: ClassVar[tuple[str, ...]] = ("model", "meta_net", "rates")
    notes: ClassVar[Notes] = Notes(
        newcomer="fine-tunes the global model with its own output of the meta-nets",
        optimized="the local steps of w, and the steps of λ",
        caveat=lambda algorithm, rounds: algorithm.caveat_after(rounds),
        averaging="samples",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        number = not isinstance(self.adapt_lr, Tensor)
        require(number, "adapt_lr", self.adapt_lr, "must be a number, the initial η̃")

    combines: ClassVar[None] = None  # an agent's draws depend on its number of samples

    def sent_in(self, round: int) -> Sequence[str]:
        return ("model",) if round <= self.pretrain_rounds else ("meta_net", "rates")

    def caveat_after(self, rounds: int) -> str | None:
        """Why results after ``rounds`` rounds are those of FedAvg; None if they are not."""
        if rounds > self.pretrain_rounds:
            return None
        return (
            f"it was FedAvg in all {rounds} rounds and learned no step sizes, as pretrain_rounds = "
            f"{self.pretrain_rounds}: raise rounds or lower pretrain_rounds"
        )

    def nets(self, objective: AnyObjective) -> MetaNets:
        return MetaNets(objective.base, self.net_width, self.most_rate)

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        rate = float(self.adapt_lr)
        rates = w.new_full((len(objective.base.sizes),), rate)
        return {"model": w, "meta_net": self.nets(objective).initial(w, rate), "rates": rates}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        w, lam, tau = received["model"], received["meta_net"], self.steps_per_round(context)
        if context.round <= self.pretrain_rounds:
            return AgentResult({"model": self.descend(context, w)}, state, Cost(tau))
        nets = self.nets(context.objective)
        train, validation = self.split(context)
        profile = nets.profile(w, context.batches.take(train).inputs)
        step = self.start_steps(context, nets.steps(lam, self.net_lr, self.base_lr))
        for t in range(tau):
            rng = context.batches.stream("fedl2p", t)
            train_mode, number = not nets.norms, self.adapt_steps + 1
            inner = [self.pick(context, train, rng, train_mode) for _ in range(number)]
            outer = self.pick(context, validation, rng, False)
            by_lam = self.hypergradient(context.objective, nets, w, lam, profile, inner, outer)
            lam = step(lam, by_lam.clamp(-self.clamp, self.clamp) if self.clamp else by_lam)
        vectors = {"meta_net": lam, "rates": nets.strategy(lam, profile)[0]}
        products = self.neumann_steps + bool(nets.norms)
        return AgentResult(vectors, state, Cost(tau * (self.adapt_steps + 2), tau * products))

    def split(self, context: AgentContext) -> tuple[Places, Places]:
        """The agent's training data in two disjoint parts, for L_T and for L_V."""
        number = len(context.batches.targets())
        order = context.batches.stream("fedl2p/split").permutation(number)
        held = max(1, round(self.hold_out * len(order)))
        return order[held:] if held < len(order) else order, order[:held]

    def pick(
        self, context: AgentContext, places: Places, rng: np.random.Generator, training: bool
    ) -> Batch:
        """A batch of these samples, in training mode or in evaluation mode."""
        picked = places[rng.choice(len(places), min(self.batch_size, len(places)), replace=False)]
        return context.batches.take(picked, torch_seed(rng) if training else None)

    def hypergradient(
        self,
        objective: AnyObjective,
        nets: MetaNets,
        w: Tensor,
        lam: Tensor,
        profile: Profile,
        inner: Sequence[Batch],
        outer: Batch,
    ) -> Tensor:
        """dL_V/dλ after a step on each of ``inner`` but the last, which is the batch of L_T(θ)."""
        rates, mixing, chain = nets.traced(lam, profile)
        eta = per_coordinate(rates, nets.objective.sizes)
        theta = adapt(objective, nets.mixed(w, profile, mixing), inner[:-1], eta)
        v, g = objective.grad(theta, outer), objective.grad(theta, inner[-1])
        hvp = partial(objective.hvp, theta, inner[-1])
        u = self.neumann(hvp, v, eta)
        by_rates, by_mixing = -per_tensor(u * g, nets.objective.sizes), v.new_empty(0)
        if nets.norms:
            rest = v - hvp(eta * u)
            by_mixing = nets.by_mixing(w, theta, profile, g, rest, eta * u)
        return chain(by_rates, by_mixing)

    def neumann(self, hvp: Callable[[Tensor], Tensor], v: Tensor, eta: Tensor) -> Tensor:
        """u = Σ_{q = 0…Q} (I − H·diag η)^q v, from the product with H."""
        u, scaled = v.clone(), torch.empty_like(v)
        for _ in range(self.neumann_steps):
            product = hvp(torch.mul(eta, v, out=scaled))
            v = torch.sub(v, product, out=product)
            u.add_(v)
        return u

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        _, model = self.start(context, received)
        return Personal({"model": model})

    def fine_tune(
        self, context: AgentContext, received: State, personal: State, steps: int, scale: float = 1
    ) -> Iterator[State]:
        eta, _ = self.start(context, received)
        batches = context.batches.draw("adapt", self.batch_size, steps)
        if self.nets(context.objective).norms:
            batches = [batch._replace(seed=None) for batch in batches]
        models = trajectory(context.objective, personal["model"], batches, scale * eta)
        return ({**personal, "model": w} for w in models)

    def start(self, context: AgentContext, received: State) -> tuple[Tensor, Tensor]:
        """The agent's η per coordinate, and w with its mixed statistics."""
        nets, w = self.nets(context.objective), received["model"]
        profile = nets.profile(w, context.batches.whole().inputs)
        rates, mixing = nets.strategy(received["meta_net"], profile)
        return per_coordinate(rates, nets.objective.sizes), nets.mixed(w, profile, mixing)

    @property
    def adaptation(self) -> Adaptation:
        return replace(super().adaptation, learned=True)

    def rate(self, objective: AnyObjective, received: State) -> Rate:
        """The mean of the last cohort's η, for bundles, which hold no meta-nets."""
        return per_coordinate(received["rates"], objective.base.sizes)


GAIN, LR_BIAS, BN_BIAS = 0.1, 1.0, 0.5  # Xavier gain and initial biases of their code
EPSILON = 1e-5  # added to variances
PIECE = 2**16  # numbers whose squares are summed at once
Chain: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""The chain rule: the gradient with respect to λ from those with respect to η and β."""


@dataclass(frozen=True)
class Profile:
    """The meta-nets' inputs for an agent, and its statistics s_i of every batch-norm layer."""

    features: Tensor
    divergences: Tensor
    statistics: list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Norm:
    """A batch-norm layer y = γ(x − μ)/r + b with r² = σ² + ε, as parts of the flat vector."""

    name: str
    epsilon: float
    gamma: Part
    b: Part
    mu: Part
    variance: Part


@dataclass(frozen=True)
class MetaNets:
    """LRNet and BNNet for one model.

    Args:
        objective: of the model.
        width: units in each hidden layer.
        most: η_max.
    """

    objective: Objective
    width: int
    most: float

    @cached_property
    def layers(self) -> list[str]:
        """The layers with parameters."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.objective.names))

    @cached_property
    def norms(self) -> list[Norm]:
        names, collected = set(self.objective.names), []
        for layer in self.layers:
            module, prefix = self.objective.layers.get(layer), f"{layer}." if layer else ""
            tensors = [prefix + n for n in ("weight", "bias", "running_mean", "running_var")]
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and names.issuperset(tensors):
                collected.append(
                    Norm(layer, module.eps, *(self.objective.part(n) for n in tensors))
                )
        return collected

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors in λ, by name, in order."""
        width, tensors, norms = self.width, len(self.objective.sizes), len(self.norms)
        shapes = {**_perceptron("lr", 2 * len(self.layers), width, tensors), "rates": (tensors,)}
        return shapes | (_perceptron("bn", norms, width, norms) if norms else {})

    def unflatten(self, lam: Tensor) -> dict[str, Tensor]:
        """The tensors of λ by name: weights and biases of both nets, and η̃ as "rates"."""
        parts = torch.split(lam, [prod(shape) for shape in self.shapes.values()])
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in named}

    def initial(self, w: Tensor, rate: float) -> Tensor:
        """The initial λ, the same in every run: η is near ``rate`` and β near 1/2."""
        rng, parts = stream(0, "fedl2p/meta_net"), []
        for name, shape in self.shapes.items():
            if name == "rates":
                parts.append(torch.full(shape, rate, dtype=torch.float64))
            elif len(shape) == 1:
                parts.append(torch.full(shape, LR_BIAS if name.startswith("lr") else BN_BIAS))
            else:
                std = GAIN * (2 / sum(shape)) ** 0.5
                parts.append(torch.from_numpy(rng.normal(scale=std, size=shape)))
        return torch.cat([part.flatten() for part in parts]).to(w)

    def steps(self, lam: Tensor, net_lr: float, base_lr: float) -> Tensor:
        """A step size for every coordinate of λ: one for η̃, one for the nets."""
        sizes = [prod(shape) for shape in self.shapes.values()]
        chosen = [base_lr if name == "rates" else net_lr for name in self.shapes]
        return per_coordinate(lam.new_tensor(chosen), sizes)

    def profile(self, w: Tensor, inputs: Inputs) -> Profile:
        """The statistics of these inputs under w."""
        seen = self.objective.layer_inputs(w, inputs, self.layers)
        features = [_mean_and_std([x.flatten() for x in seen[n]], w) for n in self.layers]
        statistics, divergences = [], []
        for norm in self.norms:
            by_channel = [x.transpose(0, 1).flatten(1) for x in seen[norm.name]]
            values = torch.cat(by_channel, dim=1)
            moments = values.mean(dim=1), values.var(dim=1, correction=min(1, values.shape[1] - 1))
            statistics.append(moments)
            divergences.append(_divergence(moments, (norm.mu.take(w), norm.variance.take(w))))
        empty = w.new_empty(0)
        return Profile(
            torch.cat(features), torch.stack(divergences) if divergences else empty, statistics
        )

    def strategy(self, lam: Tensor, profile: Profile) -> tuple[Tensor, Tensor]:
        """η and β for an agent."""
        p = self.unflatten(lam)
        rates = _clamped(_outputs("lr", p, profile.features), self.most)
        rates = rates * _clamped(p["rates"], float("inf"))
        if not self.norms:
            return rates, profile.divergences
        return rates, _clamped(_outputs("bn", p, profile.divergences), 1.0)

    def traced(self, lam: Tensor, profile: Profile) -> tuple[Tensor, Tensor, Chain]:
        """η and β, and the gradient with respect to λ from those with respect to η and β."""
        leaf = lam.detach().requires_grad_()
        with torch.enable_grad():
            rates, mixing = self.strategy(leaf, profile)

        def chain(by_rates: Tensor, by_mixing: Tensor) -> Tensor:
            with torch.enable_grad():
                along = rates @ by_rates + mixing @ by_mixing
            return torch.autograd.grad(along, leaf)[0]

        return rates.detach(), mixing.detach(), chain

    def mixed(self, w: Tensor, profile: Profile, mixing: Tensor) -> Tensor:
        """w with the statistics (1 − β)s + β·s_i."""
        for norm, moments, beta in zip(self.norms, profile.statistics, mixing, strict=True):
            for part, statistic in zip((norm.mu, norm.variance), moments, strict=True):
                w = part.put(w, (1 - beta) * part.take(w) + beta * statistic)
        return w

    def by_mixing(
        self, start: Tensor, w: Tensor, profile: Profile, g: Tensor, rest: Tensor, z: Tensor
    ) -> Tensor:
        """∂L_V/∂β − zᵀ∂²L_T/∂θ∂β at w, whose statistics are mixed from those of ``start``.

        f depends on (μ, σ², γ, b) through γ/r and b − γμ/r only, so ∂f/∂μ = −(γ/r)∂f/∂b and
        ∂f/∂σ² = −(γ/2r²)∂f/∂γ; the second derivatives follow by the product rule.

        Args:
            start: the global model.
            w: the fine-tuned one.
            profile: of the agent.
            g: ∇L_T(w).
            rest: ∇L_V(w) − ∇²L_T(w)·z.
            z: the approximation of (∇²L_T)⁻¹∇L_V.
        """
        blocks = []
        for norm, (mean, variance) in zip(self.norms, profile.statistics, strict=True):
            gamma, z_gamma = norm.gamma.take(w), norm.gamma.take(z)
            r = (norm.variance.take(w) + norm.epsilon).sqrt()
            by_mu = -(gamma * norm.b.take(rest) - z_gamma * norm.b.take(g)) / r
            by_variance = gamma * norm.gamma.take(rest) - z_gamma * norm.gamma.take(g)
            by_variance = -by_variance / (2 * r**2)
            shift = by_mu @ (mean - norm.mu.take(start))
            blocks.append(shift + by_variance @ (variance - norm.variance.take(start)))
        return torch.stack(blocks) if blocks else w.new_empty(0)


def _perceptron(name: str, inputs: int, width: int, outputs: int) -> dict[str, tuple[int, ...]]:
    sizes = [inputs, width, width, outputs]
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        shapes |= {
            f"{name}.{i}.weight": (sizes[i + 1], sizes[i]),
            f"{name}.{i}.bias": (sizes[i + 1],),
        }
    return shapes


def _outputs(name: str, p: dict[str, Tensor], x: Tensor) -> Tensor:
    for i in range(3):
        x = F.linear(x if i == 0 else F.relu(x), p[f"{name}.{i}.weight"], p[f"{name}.{i}.bias"])
    return x


def _clamped(x: Tensor, most: float) -> Tensor:
    """x within [0, most], with the derivative of x itself."""
    return x + (x.clamp(0, most) - x).detach()


def _mean_and_std(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Mean and standard deviation of all values; (0, 0) for a layer that is never called."""
    if not tensors:
        return like.new_zeros(2)
    x = (tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))).to(like.dtype)
    mean, squares = x.mean(), x.new_zeros(())
    for piece in torch.split(x, PIECE):  # small buffers stay in the cache; Tensor.var is slower
        apart = piece - mean
        squares += apart @ apart
    return torch.stack([mean, (squares / max(1, len(x) - 1) + EPSILON).sqrt()])


def _divergence(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """½KL(left‖right) + ½KL(right‖left) of normal distributions, averaged over channels.

    With variances a, b and distance d the logarithms cancel: ¼((a + d²)/b + (b + d²)/a − 2).
    """
    a, b, d2 = left[1] + EPSILON, right[1] + EPSILON, (left[0] - right[0]) ** 2
    return (((a + d2) / b + (b + d2) / a - 2) / 4).mean()
