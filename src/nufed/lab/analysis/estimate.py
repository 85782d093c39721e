"""Estimates the constants of the theory on a user's own model and data.

A constant of the theory is a supremum over all models w; the largest value measured at some models
is a *lower estimate* of it. So bounds computed from estimates are indications, not guarantees. All
of this runs in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nufed.algorithms import GMeta
from nufed.data import Federation
from nufed.errors import require
from nufed.lab.runs.records import ConstantRecord, GradientErrors
from nufed.meta.curvature import Exact, Operator, spectral_norm
from nufed.meta.fine_tuning import adapt
from nufed.meta.meta_gradient import MetaBatch, meta_gradient
from nufed.objective import Batch, Objective
from nufed.seeding import stream, torch_seed

# in names of operations with discontinuous derivatives; masks from comparisons are not detected
KINKS = (
    "relu", "threshold", "hard", "clamp", "abs", "maxi", "mini", "maxb", "minb", "maxp", "amax",
    "amin", "cumm", "celu", "elub", "elu0", "shrink", "sort", "topk", "median", "where", "l1loss",
    "huber", "fmax", "fmin",
)  # fmt: skip
SMOOTH = ("gelu", "logsumexp", "softmax")


@dataclass(frozen=True)
class TrainingPart:
    """One agent's training part as a full batch, and single samples of it."""

    full: Batch
    singles: list[Batch]


class Estimator:
    """Measures constants of an objective on a federation's training parts.

    Args:
        objective, federation: the problem.
        seed: for drawing probes, agents and samples.
        agents, samples: maximum number of agents, and of samples of each, that are measured.
    """

    def __init__(
        self,
        objective: Objective,
        federation: Federation,
        seed: int = 0,
        *,
        agents: int = 12,
        samples: int = 24,
    ) -> None:
        self.objective = objective.double
        self.seed = seed
        rng = stream(seed, "estimate/agents")
        seen = federation.split.seen
        self.agents = sorted(rng.choice(seen, min(agents, len(seen)), replace=False).tolist())
        self.federation = federation
        self.parts = [self._part(agent, samples) for agent in self.agents]
        self.everyone = [Batch(*federation.samples.take(federation.split.train[a])) for a in seen]

    def _part(self, agent: int, samples: int) -> TrainingPart:
        rows = self.federation.split.train[agent]
        take = self.federation.samples.take
        some = stream(self.seed, "estimate/samples", agent=agent).permutation(rows)[:samples]
        return TrainingPart(
            Batch(*take(rows)), [Batch(*take(some[i : i + 1])) for i in range(len(some))]
        )

    def is_smooth(self, w: Tensor) -> bool:
        """Whether the loss is twice differentiable everywhere: no operation in it has a kink."""
        names = [name.lower() for name in operations(self.objective, w, self.parts[0].full)]
        kinked = (any(k in n for k in KINKS) and not any(k in n for k in SMOOTH) for n in names)
        return not any(kinked)

    def gradient(self, models: Sequence[Tensor]) -> ConstantRecord:
        """B: the norm of ∇f_i."""
        return ConstantRecord.largest(
            [float(self.objective.grad(w, s.full).norm()) for w in models for s in self.parts]
        )

    def smoothness(self, models: Sequence[Tensor]) -> ConstantRecord:
        """L: the largest absolute eigenvalue of ∇²f_i, by Lanczos."""
        return ConstantRecord.largest([value for w in models for value in self.curvatures(w)])

    def curvatures(self, w: Tensor, iterations: int = 16) -> list[float]:
        """The largest absolute eigenvalue of each agent's ∇²f_i, by Lanczos."""
        return [self._norm(self._hessian(w, part.full), iterations) for part in self.parts]

    def hessian_lipschitz(self, models: Sequence[Tensor]) -> ConstantRecord:
        """ρ: ‖∇²f_i(w + r) − ∇²f_i(w)‖/‖r‖ over short steps r where curvature changes most."""
        values = []
        for place, w in enumerate(models):
            for number, part in enumerate(self.parts):
                probe = self._probe(f"rho/{place}/{number}")
                for start in (self.objective.grad(w, part.full), probe):
                    direction = self._sharpest_direction(w, part.full, start)
                    r = 1e-3 * (1 + w.norm()) * direction
                    there, here = (self._hessian(x, part.full) for x in (w + r, w))
                    change = self._norm(lambda v, t=there, h=here: t(v) - h(v))  # type: ignore[misc]
                    values.append(change / float(r.norm()))
        return ConstantRecord.largest(values)

    def _sharpest_direction(
        self, w: Tensor, batch: Batch, v: Tensor, iterations: int = 8
    ) -> Tensor:
        """A direction along which curvature changes most: the power method on third derivatives.

        v ← ∇³f(w)[v, v, ·], as the second difference of gradients; a symmetric tensor attains its
        norm at equal arguments.
        """
        h = 1e-3 * (1 + w.norm())
        middle = self.objective.grad(w, batch)
        for _ in range(iterations):
            v = v / v.norm() if v.norm() > 0 else torch.ones_like(v) / v.numel() ** 0.5
            ahead, behind = (self.objective.grad(w + s * h * v, batch) for s in (1, -1))
            second = ahead - 2 * middle + behind
            if not second.norm() > 1e-12 * (1 + middle.norm()):
                return v
            v = second
        most: Tensor = v / v.norm()
        return most

    def gradient_noise(self, models: Sequence[Tensor]) -> tuple[ConstantRecord, ConstantRecord]:
        """σ_G and κ_G: standard deviation and fourth moment of one sample's gradient."""
        deviations, fourths = [], []
        for w in models:
            for part in self.parts:
                values = torch.stack([self.objective.grad(w, single) for single in part.singles])
                squares = (values - values.mean(dim=0)).square().sum(dim=1)
                deviations.append(float(squares.mean().sqrt()))
                fourths.append(float(squares.square().mean()))
        return ConstantRecord.largest(deviations), ConstantRecord.largest(fourths)

    def hessian_noise(
        self, models: Sequence[Tensor], probes: int = 4
    ) -> tuple[ConstantRecord, ConstantRecord]:
        """σ_H and κ_H of one sample's Hessian.

        σ_H² is the largest E‖(∇²ℓ − ∇²f)v‖² over unit vectors v, by Lanczos: what the tight bounds
        need. κ_H is the fourth moment of the Frobenius norm, by pairs of random sign probes, but at
        least σ_H⁴, its lower bound.
        """
        deviations, fourths = [], []
        signs = [self._probe(f"kappa_H/{i}").sign() for i in range(probes)]
        for w in models:
            for part in self.parts:

                def noise(v: Tensor, w: Tensor = w, part: TrainingPart = part) -> Tensor:
                    products = torch.stack([self.objective.hvp(w, s, v) for s in part.singles])
                    return products - products.mean(dim=0)  # a row per sample

                def squared(v: Tensor, w: Tensor = w, part: TrainingPart = part) -> Tensor:
                    again = [
                        self.objective.hvp(w, s, row)
                        for s, row in zip(part.singles, noise(v, w, part), strict=True)
                    ]
                    # the mean Hessian's part vanishes: the rows of noise(v) have mean 0
                    return torch.stack(again).mean(dim=0)

                deviations.append(self._norm(squared, 6) ** 0.5)
                squares = torch.stack([noise(v).square().sum(dim=1) for v in signs])
                pairs = squares.sum(dim=0).square() - squares.square().sum(dim=0)
                probed = float(pairs.mean()) / (probes * (probes - 1))
                fourths.append(max(probed, deviations[-1] ** 4))
        return ConstantRecord.largest(deviations), ConstantRecord.largest(fourths)

    def gradient_dissimilarity(self, models: Sequence[Tensor]) -> ConstantRecord:
        """γ_G: the standard deviation of ∇f_i over agents."""
        return ConstantRecord.largest([spread(self.gradients(w)) for w in models])

    def hessian_dissimilarity(self, models: Sequence[Tensor]) -> ConstantRecord:
        """γ_H: the root mean square over agents of ‖∇²f_i − ∇²f‖, by Lanczos."""
        values = []
        for w in models:
            hessians = [self._hessian(w, part.full) for part in self.parts]

            def mean(v: Tensor, hessians: list[Operator] = hessians) -> Tensor:
                return torch.stack([h(v) for h in hessians]).mean(dim=0)

            norms = [self._norm(lambda v, h=h: h(v) - mean(v), 8) for h in hessians]  # type: ignore[misc]
            values.append(float(np.sqrt(np.mean(np.square(norms)))))
        return ConstantRecord.largest(values)

    def meta_gradients(
        self, w: Tensor, algorithm: GMeta, batches: Sequence[Batch] | None = None
    ) -> Tensor:
        """∇F_i(w) on each agent's whole training part, one row per seen agent."""
        nu = algorithm.adapt_steps
        return torch.stack(
            [
                meta_gradient(
                    self.objective,
                    w.double(),
                    MetaBatch([full] * nu, full, [full] * nu),
                    lr=algorithm.adapt_lr,
                    curvature=Exact(),
                )
                for full in batches or self.everyone
            ]
        )

    def meta_value(self, w: Tensor, algorithm: GMeta) -> float:
        """F(w): the mean loss of the agents' training parts after ν steps on them."""
        values = []
        for full in self.everyone:
            adapted = adapt(self.objective, w, [full] * algorithm.adapt_steps, algorithm.adapt_lr)
            values.append(float(self.objective.value(adapted, full)))
        return float(np.mean(values))

    def measure(self, w: Tensor, algorithm: GMeta, repeats: int = 64) -> GradientErrors:
        """Bias and error of the algorithm's stochastic meta-gradient against ∇F_i, over agents.

        Both are root mean squares over agents and repeats.

        The bias is the distance of the mean over repeats from ∇F_i, less the part due to sampling
        (its expectation and two standard errors over agents).
        """
        require(repeats >= 2, "repeats", repeats, "must be 2 or more")
        true = self.meta_gradients(w, algorithm, [part.full for part in self.parts])
        biases: list[float] = []
        errors: list[float] = []
        for agent, right in zip(self.agents, true, strict=True):
            off = torch.stack(
                [self._sample(w, algorithm, agent, i) - right for i in range(repeats)]
            )
            sampling = off.var(dim=0).sum() / repeats
            biases.append(float(off.mean(dim=0).square().sum() - sampling))
            errors.append(float(off.square().sum(dim=1).mean()))
        bias = np.mean(biases) - 2 * np.std(biases) / np.sqrt(len(biases))
        error = float(np.mean(errors)) ** 0.5
        return GradientErrors(bias=max(0.0, float(bias)) ** 0.5, error=error)

    def _sample(self, w: Tensor, algorithm: GMeta, agent: int, repeat: int) -> Tensor:
        batches = self.federation.batches(agent, self.seed, "estimate", repeat)
        batch = algorithm.meta_batch(batches, 0)
        return meta_gradient(
            self.objective, w.double(), batch, lr=algorithm.adapt_lr, curvature=algorithm.curvature
        )

    def gradients(self, w: Tensor) -> Tensor:
        """∇f_i(w) of the measured agents, one row for each."""
        return torch.stack([self.objective.grad(w, part.full) for part in self.parts])

    def _hessian(self, w: Tensor, batch: Batch) -> Operator:
        return lambda v: self.objective.hvp(w, batch, v)

    def _probe(self, purpose: str) -> Tensor:
        generator = torch.Generator().manual_seed(torch_seed(stream(self.seed, purpose)))
        return torch.randn(self.objective.size, generator=generator, dtype=torch.float64)

    def _norm(self, operator: Operator, iterations: int = 16) -> float:
        return spectral_norm(operator, self._probe("lanczos"), iterations)


def spread(rows: Tensor) -> float:
    """The standard deviation of vectors about their mean."""
    return float((rows - rows.mean(dim=0)).square().sum(dim=1).mean().sqrt())


def operations(objective: Objective, w: Tensor, batch: Batch) -> set[str]:
    """The names of the nodes in autograd's graph of f."""
    with torch.enable_grad():
        stack = [objective.forward(w.detach().requires_grad_(), batch).grad_fn]
    nodes = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack.extend(before for before, _ in node.next_functions)
    return {type(node).__name__ for node in nodes}
