"""The meta-nets of FedL2P: their inputs, outputs and derivatives.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nufed.meta.fine_tuning import per_coordinate
from nufed.objective import Inputs, Objective
from nufed.objective.parts import Part
from nufed.seeding import stream

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
        names, found = set(self.objective.names), []
        for layer in self.layers:
            module, prefix = self.objective.layer(layer), f"{layer}." if layer else ""
            tensors = [prefix + n for n in ("weight", "bias", "running_mean", "running_var")]
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and names.issuperset(tensors):
                found.append(Norm(layer, module.eps, *(self.objective.part(n) for n in tensors)))
        return found

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
            own = values.mean(dim=1), values.var(dim=1, correction=min(1, values.shape[1] - 1))
            statistics.append(own)
            divergences.append(_divergence(own, (norm.mu.take(w), norm.variance.take(w))))
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
        for norm, own, beta in zip(self.norms, profile.statistics, mixing, strict=True):
            for part, statistic in zip((norm.mu, norm.variance), own, strict=True):
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
        found = []
        for norm, (mean, variance) in zip(self.norms, profile.statistics, strict=True):
            gamma, z_gamma = norm.gamma.take(w), norm.gamma.take(z)
            r = (norm.variance.take(w) + norm.epsilon).sqrt()
            by_mu = -(gamma * norm.b.take(rest) - z_gamma * norm.b.take(g)) / r
            by_variance = gamma * norm.gamma.take(rest) - z_gamma * norm.gamma.take(g)
            by_variance = -by_variance / (2 * r**2)
            shift = by_mu @ (mean - norm.mu.take(start))
            found.append(shift + by_variance @ (variance - norm.variance.take(start)))
        return torch.stack(found) if found else w.new_empty(0)


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
    """Over all values together; (0, 0) for a layer that is never called by itself."""
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
