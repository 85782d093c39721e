"""Local training in Gram space: the same algorithm without products with the wide first layer.

Let the first layer be linear, Z = XWᵀ, with X an agent's samples (and a column of ones for the
bias) and W the layer's weight (and bias). Its gradient on a batch b is (∂ℓ/∂Z)ᵀX[b], so every
vector that gradient steps with scalar step sizes can reach from W₀ has the form

    W = s·W₀ + CᵀX     with one row of C per sample,

and the layer's outputs are Z = s·Z₀ + KC with Z₀ = XW₀ᵀ and K = XXᵀ. A gradient is ∂ℓ/∂Z in the
rows b of C (not autograd's derivative with respect to C, which would be K∂ℓ/∂Z), and Hessian-vector
products apply the same map to a direction. Points have s = 1, gradients s = 0.

So an agent's round needs the products Z₀ at its beginning and CᵀX at its end, whatever the number
of steps; the products in between have the size of a batch. Most rows of C are zero, so a vector
stores only the others, one for each use of a sample; when they become many, those of the same
sample are summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from nufed.objective import AnyBatch, Batch, Objective
from nufed.objective.modules import has_hooks

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

MOST_ROWS = 2048  # of a vector, above which the rows of a sample are summed


@dataclass(frozen=True)
class FirstLayer:
    """A first linear layer: its position in the flat vector, and the rest of the module."""

    start: int
    outputs: int
    inputs: int
    bias: bool
    rest: Objective

    @property
    def _sizes(self) -> list[int]:
        bias = self.outputs if self.bias else 0
        return [self.start, self.outputs * self.inputs, bias, self.rest.size - self.start]

    def apply(self, w: Tensor, inputs: Tensor) -> Tensor:
        """The layer's outputs, XWᵀ."""
        _, weight, bias, _ = self._parts(w)
        return torch.addmm(bias, inputs, weight.T) if self.bias else inputs @ weight.T

    def gram(self, inputs: Tensor, others: Tensor) -> Tensor:
        """The kernel matrix K of two sets of samples."""
        return inputs @ others.T + int(self.bias)

    def fill_gram(self, table: Tensor, inputs: Tensor, block: int = 128) -> None:
        """Write K of these samples into a table, computing only its lower triangle."""
        for first in range(0, len(inputs), block):
            here = slice(first, first + block)
            columns = self.gram(inputs[first:], inputs[here])
            table[first : len(inputs), first : first + columns.shape[1]] = columns
            table[first : first + columns.shape[1], first : len(inputs)] = columns.T

    def norm(self, w: Tensor) -> float:
        """‖W‖."""
        _, weight, bias, _ = self._parts(w)
        return math.hypot(float(weight.norm()), float(bias.norm()))

    def others(self, w: Tensor) -> Tensor:
        """All parameters but the layer's."""
        before, _, _, after = self._parts(w)
        return torch.cat([before, after])

    def vector(
        self, w: Tensor, scale: float, rows: Tensor, inputs: Tensor, others: Tensor
    ) -> Tensor:
        """The flat vector with W = s·W₀ + CᵀX and the other parameters, where w holds W₀."""
        result = w.clone()
        before, weight, bias, after = self._parts(result)
        self._add_combination(weight, rows, inputs, scale)
        if self.bias:
            bias.mul_(scale).add_(rows.sum(dim=0))
        before.copy_(others[: self.start])
        after.copy_(others[self.start :])
        return result

    def _add_combination(self, weight: Tensor, rows: Tensor, inputs: Tensor, scale: float) -> None:
        """Turn W₀ into s·W₀ + CᵀX, in place."""
        weight.addmm_(rows.T, inputs, beta=scale)

    def _parts(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        before, weight, bias, after = torch.split(w, self._sizes)
        return before, weight.view(self.outputs, self.inputs), bias, after


def first_layer(
    objective: Objective, input_shape: Sequence[int], kind: type[FirstLayer] = FirstLayer
) -> FirstLayer | None:
    """The module's first linear layer, if it is applied to the unchanged inputs; else None.

    It is of this ``kind``. The engine is verified by a trial all the same.
    """
    # an empty parameter, as logistic regression has no others
    module = nn.Sequential(objective.module(objective.initial()))
    module.register_parameter("none", nn.Parameter(objective.initial().new_empty(0)))
    every = [p for _, p in module.named_parameters(remove_duplicate=False)]
    start = 0
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        if type(owner) is nn.Linear and owner.in_features == math.prod(input_shape):
            parameters = [p for p in (owner.weight, owner.bias) if p is not None]
            tied = sum(p is q for p in every for q in parameters) > len(parameters)
            if (
                tied
                or parameter is not owner.weight
                or not all(p.requires_grad for p in parameters)
            ):
                return None
            if not _only_user_of_inputs(owner, module, input_shape):
                return None
            module.set_submodule(name.rpartition(".")[0], nn.Identity())
            bias = owner.bias is not None
            rest = objective.variant(module=module)
            return kind(start, owner.out_features, owner.in_features, bias, rest)
        start += parameter.numel() if parameter.requires_grad else 0
    return None


def _only_user_of_inputs(layer: nn.Linear, module: nn.Module, input_shape: Sequence[int]) -> bool:
    """Whether the layer alone gets the module's inputs, and gets them unchanged.

    Decided by the address of the tensor that the layer gets and by autograd's graph: comparing
    values would miss a function that happens to change none of them (a clamp).
    """
    if has_hooks(layer):
        return False
    x = torch.linspace(-1, 1, 2 * math.prod(input_shape)).to(layer.weight)
    x = x.view(2, *input_shape).requires_grad_()
    met: list[Tensor] = []

    def cut(_: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
        met.append(inputs[0])
        return outputs.detach()

    handle = layer.register_forward_hook(cut)
    try:
        with torch.enable_grad():
            outputs = module(x)
            past = (
                outputs.requires_grad
                and torch.autograd.grad(outputs.sum(), x, allow_unused=True)[0]
            )
    except Exception:  # modules may raise anything on such inputs
        return False
    finally:
        handle.remove()
    same = len(met) == 1 and met[0].data_ptr() == x.data_ptr() and met[0].shape[0] == len(x)
    return same and met[0].is_contiguous() and not isinstance(past, Tensor)


@dataclass(frozen=True)
class GramVector:
    """A vector for every agent of a chunk: s, the non-zero rows of C, and the other parameters.

    It replaces a tensor in the arithmetic of algorithms: sums, and multiples by scalars or by one
    scalar per agent, (agents, 1).

    Args:
        scale: s, a number, or one per agent.
        places: the sample index of each row, (agents, rows); rows of the same sample are summed.
        rows: (agents, rows, outputs of the layer).
        others: the other parameters, (agents, their number).
    """

    scale: float | Tensor
    places: Tensor
    rows: Tensor
    others: Tensor

    def __add__(self, other: GramVector) -> GramVector:
        scale, others = self.scale + other.scale, self.others + other.others
        if self.places is other.places:  # of one batch: row by row, so that differences are exact
            return GramVector(scale, self.places, self.rows + other.rows, others)
        places = torch.cat([self.places, other.places], dim=1)
        rows = torch.cat([self.rows, other.rows], dim=1)
        if places.shape[1] > MOST_ROWS:
            places, rows = _one_row_per_place(places, rows)
        return GramVector(scale, places, rows, others)

    def __mul__(self, factor: float | Tensor) -> GramVector:
        by_row = factor.unsqueeze(2) if isinstance(factor, Tensor) else factor
        scale = 0.0 if self.is_direction else self.scale * factor
        return GramVector(scale, self.places, self.rows * by_row, self.others * factor)

    __rmul__ = __mul__

    def __sub__(self, other: GramVector) -> GramVector:
        return self + other * -1.0

    def __truediv__(self, divisor: float | Tensor) -> GramVector:
        return self * (1 / divisor)

    def of(self, agent: int) -> tuple[float, Rows, Tensor, Tensor]:
        """One agent's s, its sample indices, their rows of C, and the other parameters."""
        places = distinct(self.places[agent].numpy())
        rows = self.rows.new_zeros(len(places), self.rows.shape[2])
        order = np.searchsorted(places, self.places[agent].numpy())
        rows.index_add_(0, torch.from_numpy(order), self.rows[agent])
        scale = float(self.scale[agent]) if isinstance(self.scale, Tensor) else self.scale
        return scale, places, rows, self.others[agent]

    @property
    def dtype(self) -> torch.dtype:
        return self.others.dtype

    def to(self, dtype: torch.dtype) -> GramVector:
        return replace(self, rows=self.rows.to(dtype), others=self.others.to(dtype))

    @property
    def is_direction(self) -> bool:
        """Whether s = 0."""
        return not isinstance(self.scale, Tensor) and self.scale == 0


@dataclass(frozen=True)
class GramObjective:
    """The objective of a chunk of agents in Gram space (a :class:`nufed.objective.AnyObjective`).

    Its vectors are :class:`GramVector`; the inputs of a batch are sample indices.

    Args:
        base: the objective on the module's own parameters.
        layer: its first layer.
        gram: tables of K, (tables, samples, samples); only samples with rows in C need a column.
        tables: the index of each agent's table.
        start: Z₀, (agents, samples, outputs of the layer).
        start_norm: ‖W₀‖.
    """

    base: Objective
    layer: FirstLayer
    gram: Tensor
    tables: Tensor
    start: Tensor
    start_norm: float

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.rest.dtype

    @cached_property
    def double(self) -> GramObjective:
        """This objective with vectors in float64; K and Z₀ are cast where they are used."""
        return replace(self, layer=replace(self.layer, rest=self.layer.rest.double))

    def initial(self, others: Tensor) -> GramVector:
        """The vector of every agent at W₀ with these other parameters: s = 1 and C = 0."""
        agents = len(self.tables)
        places = torch.empty(agents, 0, dtype=torch.int64)
        rows = others.new_empty(agents, 0, self.layer.outputs)
        return GramVector(1.0, places, rows, others.repeat(agents, 1))

    def grad(self, w: GramVector, batch: AnyBatch) -> GramVector:
        """∇f(w, batch), one per agent."""
        places = _places(batch)
        return self._grad(places, self._through(w, places), w.others, batch)

    def hvp(self, w: GramVector, batch: AnyBatch, v: GramVector) -> GramVector:
        """∇²f(w, batch)·v, one per agent."""
        places = _places(batch)
        hidden, change = self._through(w, places), self._through(v, places)
        others, rows = self.layer.rest.joint.hvp(
            w.others, Batch(hidden, *batch[1:]), v.others, change
        )
        assert rows is not None
        return GramVector(0.0, places, rows, others)

    def beside(
        self, w: GramVector, batch: AnyBatch, v: GramVector, step: float | Tensor
    ) -> tuple[GramVector, GramVector]:
        """∇f(w+δv) and ∇f(w−δv); the layer is linear, so its outputs are Z(w) ± δZ(v)."""
        places = _places(batch)
        hidden, change = self._through(w, places), self._through(v, places)
        change = change * (step.unsqueeze(2) if isinstance(step, Tensor) else step)
        others, beside = w.others.to(self.dtype), v.others.to(self.dtype) * step
        ahead = self._grad(places, hidden + change, others + beside, batch)
        behind = self._grad(places, hidden - change, others - beside, batch)
        return ahead, behind

    def norm(self, w: GramVector) -> Tensor:
        """An upper bound on the norm of the weights that w represents, (agents, 1).

        ‖W‖ ≤ |s|·‖W₀‖ + Σ_i ‖C_i‖·‖x_i‖ with ‖x_i‖² = K_ii, which suffices for a finite-difference
        step.
        """
        lengths = self.gram[self.tables.unsqueeze(1), w.places, w.places].sqrt()
        rows = torch.linalg.vector_norm(w.rows, dim=2)
        start = torch.as_tensor(w.scale, dtype=w.dtype).abs() * self.start_norm
        weights = start + (rows * lengths).sum(dim=1, keepdim=True)
        return torch.hypot(weights, self.layer.rest.norm(w.others))

    def predict(self, w: GramVector, places: Tensor) -> Tensor:
        """The module's outputs for the samples at these indices, in evaluation mode."""
        return self.layer.rest.predict(w.others, self._through(w, places))

    def _grad(self, places: Tensor, hidden: Tensor, others: Tensor, batch: AnyBatch) -> GramVector:
        """The gradient where the layer's outputs are ``hidden``."""
        by_others, rows = self.layer.rest.joint.grad(
            others, Batch(hidden, *batch[1:]), by_inputs=True
        )
        assert rows is not None
        return GramVector(0.0, places, rows, by_others)

    def _through(self, w: GramVector, places: Tensor) -> Tensor:
        """The layer's outputs for the samples at these indices: s·Z₀[b] + K[b]C.

        Computed in the precision of K, which is the layer's own.
        """
        first_start, first_gram = self._first_rows
        columns = w.places.unsqueeze(1).expand(-1, places.shape[1], -1)
        gram = torch.gather(_rows(self.gram, places + first_gram), 2, columns)
        rows = w.rows.to(gram.dtype)
        if w.is_direction:
            return torch.bmm(gram, rows).to(self.dtype)
        scale = w.scale.unsqueeze(2) if isinstance(w.scale, Tensor) else w.scale
        start = _rows(self.start, places + first_start)
        return torch.baddbmm(start * scale, gram, rows).to(self.dtype)

    @cached_property
    def _first_rows(self) -> tuple[Tensor, Tensor]:
        """Where each agent's rows begin in ``start`` and in ``gram``."""
        agents = torch.arange(len(self.tables))
        return (
            (agents * self.start.shape[1]).unsqueeze(1),
            (self.tables * self.gram.shape[1]).unsqueeze(1),
        )


def _one_row_per_place(places: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """An equal vector with one row per sample: the sum of its rows."""
    agents, size = len(places), int(places.max()) + 1
    added = rows.new_zeros(agents, size, rows.shape[2])
    added.scatter_add_(1, places.unsqueeze(2).expand_as(rows), rows)
    return torch.arange(size).repeat(agents, 1), added


def distinct(places: Rows, but: Rows | None = None) -> Rows:
    """The distinct indices without those in ``but``, sorted; numpy's functions sort, at ten times
    the cost.

    >>> distinct(np.array([3, 1, 3, 0]), but=np.array([0])).tolist()
    [1, 3]
    """
    marks = np.zeros(places.max(initial=-1) + 1, dtype=bool)
    marks[places] = True
    if but is not None:
        marks[but[but < len(marks)]] = False
    return np.flatnonzero(marks)


def _places(batch: AnyBatch) -> Tensor:
    places = batch[0]
    assert isinstance(places, Tensor)
    return places


def _rows(tables: Tensor, index: Tensor) -> Tensor:
    """Rows of a stack of tables, indexed consecutively over all tables."""
    return tables.flatten(0, 1).index_select(0, index.flatten()).view(*index.shape, -1)
