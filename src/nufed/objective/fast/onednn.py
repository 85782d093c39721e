"""Wide products in float32 by oneDNN, with which torch convolves.

torch's own products are MKL's, which computes on AMD processors with half the width of their
vector registers: there oneDNN takes half as long. It rounds differently, so engines that use it
have names of their own. Calling it takes longer, which only large products recover. Elsewhere, and
in other dtypes, products are torch's own.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nufed.objective import Objective
from nufed.objective.fast.gram_space import FirstLayer
from nufed.objective.modules import MovedStatistics, has_hooks

AVAILABLE = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # in this build of torch
LARGE = 2**22  # multiplications of a product, from which oneDNN is faster
PAYS = 2**25  # from which they make up for one more layer of autograd's graph in Python
BLOCK = 1024  # outputs of a layer whose weights are computed at once: they take memory


def product(a: Tensor, b: Tensor) -> Tensor:
    """a·bᵀ of two matrices.

    >>> product(torch.ones(1, 3), torch.ones(2, 3))
    tensor([[3., 3.]])
    """
    large = _large(a, b.T)
    return a @ b.T if large is None else large


def _large(a: Tensor, b: Tensor) -> Tensor | None:
    """a·b by oneDNN, if it is faster."""
    plain = a.dtype == b.dtype == torch.float32 and a.device.type == "cpu"
    if not (AVAILABLE and plain and a.numel() * b.shape[1] >= LARGE):
        return None
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
    return result


class Product(torch.autograd.Function):
    """a·bᵀ, whose derivatives are products of the same kind, in any order."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return product(a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (d,), (a, b) = gradients, ctx.saved_tensors
        by_a, by_b = ctx.needs_input_grad
        return _product(d, b.T) if by_a else None, _product(d.T, a.T) if by_b else None


def _product(a: Tensor, b: Tensor) -> Tensor:
    if not torch.is_grad_enabled():  # the backward pass of a first derivative
        return product(a, b)
    return Product.apply(a, b)  # type: ignore[no-any-return, no-untyped-call]


class OneDNNLinear(nn.Linear):
    """A linear layer whose large products are oneDNN's."""

    draws_nothing = True

    def forward(self, input: Tensor) -> Tensor:
        """XWᵀ + b."""
        if input.dtype != torch.float32 or input.numel() * self.out_features < LARGE:
            return F.linear(input, self.weight, self.bias)
        outputs = _product(input.flatten(0, -2), self.weight)
        outputs = outputs.view(*input.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs + self.bias


def with_onednn(objective: Objective) -> Objective:
    """A copy of an objective that computes large products of linear layers by oneDNN.

    In mixed precision they already are.
    """
    same, module = copy.copy(objective), objective._module
    if objective._precision != "float32":
        return same
    vars(same).pop("double", None)
    shared: dict[int, Any] = {id(t): t for t in chain(module.parameters(), module.buffers())}
    same._module, same._moved = copy.deepcopy(module, shared), MovedStatistics()
    for layer in _linear_layers(same._module):
        layer.__class__ = OneDNNLinear
    return same


def closed_form(objective: Objective) -> Objective | None:
    """The same objective with derivatives by single vectors written out, as those of stacks, and
    with large products by oneDNN; None if they are written out for no such module and loss.
    """
    if objective._fast is None or objective._micro.size:
        return None
    same = with_onednn(objective) if objective.dtype == torch.float32 else copy.copy(objective)
    same._fast, same._closed = replace(objective._fast, wide=_large), True
    return same


def has_large_products(objective: Objective, samples: int) -> bool:
    """Whether :func:`with_onednn` pays on float32 batches of this number of samples."""
    if objective.dtype != torch.float32 or objective._precision != "float32":
        return False
    layers = _linear_layers(objective._module)
    on_cpu = objective.initial().device.type == "cpu"
    return on_cpu and any(samples * m.in_features * m.out_features >= PAYS for m in layers)


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [m for m in module.modules() if type(m) is nn.Linear and not has_hooks(m)]


class OneDNNFirstLayer(FirstLayer):
    """A first layer whose products are oneDNN's."""

    def apply(self, w: Tensor, inputs: Tensor) -> Tensor:
        _, weight, bias, _ = self._parts(w)
        outputs = product(inputs, weight)
        return outputs.add_(bias) if self.bias else outputs

    def gram(self, inputs: Tensor, others: Tensor) -> Tensor:
        return product(inputs, others) + int(self.bias)

    def _add_combination(self, weight: Tensor, rows: Tensor, inputs: Tensor, scale: float) -> None:
        columns = inputs.T
        for first in range(0, len(weight), BLOCK):
            some = slice(first, first + BLOCK)
            torch.add(product(rows.T[some], columns), weight[some], alpha=scale, out=weight[some])
