"""The linear first layer of a module, separated from the rest, for training in Gram space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nufed.objective import Objective
from nufed.objective.modules import has_hooks


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
        weight.addmm_(rows.T, inputs, beta=scale)
        if self.bias:
            bias.mul_(scale).add_(rows.sum(dim=0))
        before.copy_(others[: self.start])
        after.copy_(others[self.start :])
        return result

    def _parts(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        before, weight, bias, after = torch.split(w, self._sizes)
        return before, weight.view(self.outputs, self.inputs), bias, after


def first_layer(objective: Objective, input_shape: Sequence[int]) -> FirstLayer | None:
    """The module's first linear layer, if it is applied to the unchanged inputs; else None.

    The engine is verified by a trial all the same.
    """
    # an empty parameter, as logistic regression has no others
    module = nn.Sequential(objective.module(objective.initial()))
    module.register_parameter("none", nn.Parameter(torch.empty(0, dtype=objective.dtype)))
    every = [p for _, p in module.named_parameters(remove_duplicate=False)]
    start = 0
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        if type(owner) is nn.Linear and owner.in_features == math.prod(input_shape):
            own = [p for p in (owner.weight, owner.bias) if p is not None]
            tied = sum(p is q for p in every for q in own) > len(own)
            if tied or parameter is not owner.weight or not all(p.requires_grad for p in own):
                return None
            if not _only_user_of_inputs(owner, module, input_shape):
                return None
            module.set_submodule(name.rpartition(".")[0], nn.Identity())
            bias = owner.bias is not None
            rest = objective.with_module(module)
            return FirstLayer(start, owner.out_features, owner.in_features, bias, rest)
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
