"""A module and its loss for several agents at once, each with its own parameters.

Agents are the first dimension: row a of each parameter is applied to row a of the inputs. Linear
layers run as batched products, everything else under ``torch.func.vmap``. Either way the overhead
of an operation is paid once for all agents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from nufed.objective.modules import has_hooks, logits_of

ELEMENTWISE = (
    nn.ELU, nn.GELU, nn.Identity, nn.LeakyReLU, nn.ReLU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Tanh,
)  # fmt: skip


def stacked_outputs(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    arguments: tuple[Tensor, ...],
    keywords: Mapping[str, Tensor],
) -> Tensor:
    """The module's outputs, (agents, samples, …); it must not draw random numbers."""
    if len(arguments) == 1 and not keywords:
        return _layer(module, "", parameters, arguments[0])
    return _any_module(module, parameters, arguments, keywords)


def stacked_losses(
    loss: Callable[[Tensor, Tensor], Any], outputs: Tensor, targets: Tensor
) -> Tensor:
    """Every agent's loss, (agents,)."""
    if loss is F.cross_entropy and outputs.ndim == 3 and targets.ndim == 2:
        each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        return each.view(targets.shape).mean(dim=1)
    losses: Tensor = vmap(loss)(outputs, targets)
    return losses.reshape(len(outputs))


def _layer(layer: nn.Module, prefix: str, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
    kind = type(layer)
    if has_hooks(layer):
        kind = nn.Module
    if kind is nn.Sequential:
        for name, child in layer._modules.items():  # named_children() gives repeated ones once
            x = _layer(child or nn.Identity(), f"{prefix}{name}.", parameters, x)
        return x
    if kind in ELEMENTWISE:
        return layer(x)  # type: ignore[no-any-return]
    if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
        return x.flatten(2)
    if kind is nn.Linear and x.ndim == 3 and f"{prefix}weight" in parameters:
        weight, bias = (parameters.get(prefix + name) for name in ("weight", "bias"))
        if weight is not None and (bias is None) == (layer.bias is None):
            columns = weight.transpose(1, 2)
            if bias is None:
                return torch.bmm(x, columns)
            return torch.baddbmm(bias.unsqueeze(1), x, columns)
    of_layer = {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}
    return _any_module(layer, of_layer, (x,), {})


def _any_module(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    arguments: tuple[Tensor, ...],
    keywords: Mapping[str, Tensor],
) -> Tensor:
    def outputs(p: dict[str, Tensor], a: tuple[Tensor, ...], k: dict[str, Tensor]) -> Tensor:
        return logits_of(functional_call(module, p, a, k, tie_weights=False))

    # either container may be empty, which vmap accepts
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no batching rule
        result: Tensor = vmap(outputs)(dict(parameters), arguments, dict(keywords))
    return result
