"""Passes through networks of linear layers, BatchNorm and activations, without autograd.

On small networks autograd's overhead dominates. A network is a chain of such layers, or stages with
exits (:mod:`nufed.objective.exits`). The passes call the operations that autograd would call, so
that gradients have the same bits. The loss is not part of it: it may be any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nufed.objective.batch import Batch
from nufed.objective.exits import FirstExits, exit_lists
from nufed.objective.modules import STATISTICS, has_hooks
from nufed.objective.perceptron import ACTIVATIONS, Activation, Parameters

CONTAINERS = nn.Sequential, FirstExits
norm_backward = torch.ops.aten.native_batch_norm_backward.default


class Layer:
    """A layer with its tensors; a backward pass is that of the last forward pass.

    ``trained`` are its parameters, and ``gradients`` theirs from the last backward pass.
    """

    trained: Sequence[Tensor] = ()
    gradients: Sequence[Tensor] = ()

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def backward(self, d: Tensor) -> Tensor:
        """The derivative by its inputs, from that by its outputs."""
        raise NotImplementedError

    def fuse(self, lr: float) -> None:
        """Let backward passes include the steps of matrices, which are then not among ``trained``.

        That saves passes over memory, and equals separate steps to rounding.
        """


class Dense(Layer):
    """x ↦ xWᵀ + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias, self.transposed = weight, bias, weight.t()
        self.trained = (weight,) if bias is None else (weight, bias)
        self.gradients = [torch.empty_like(own) for own in self.trained]  # for all passes
        self.is_first = False  # then the derivative by its inputs is not needed
        self.lr: float | None = None

    def fuse(self, lr: float) -> None:
        self.lr, self.trained, self.gradients = lr, self.trained[1:], self.gradients[1:]

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        if self.bias is None:
            return torch.mm(x, self.transposed)
        return torch.addmm(self.bias, x, self.transposed)

    def backward(self, d: Tensor) -> Tensor:
        by_inputs = d if self.is_first else torch.mm(d, self.weight)
        if self.lr is None:
            torch.mm(d.t(), self.x, out=self.gradients[0])
        else:
            self.weight.addmm_(d.t(), self.x, alpha=-self.lr)
        if self.bias is not None:
            torch.sum(d, dim=0, out=self.gradients[-1])
        return by_inputs


class BatchNorm(Layer):
    """BatchNorm in training; forward passes update its running statistics in place."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        momentum: float,
        eps: float,
    ) -> None:
        self.trained, self.running = (weight, bias), (mean, variance)
        self.momentum, self.eps = momentum, eps

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.trained
        y, *statistics = torch.native_batch_norm(
            x, weight, bias, *self.running, True, self.momentum, self.eps
        )
        self.x, self.statistics = x, statistics
        return y

    def backward(self, d: Tensor) -> Tensor:
        by_inputs: Tensor
        by_inputs, *self.gradients = norm_backward(
            d, self.x, self.trained[0], *self.running, *self.statistics, True, self.eps, [True] * 3
        )
        return by_inputs


class Elementwise(Layer):
    """An activation."""

    def __init__(self, function: Activation) -> None:
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        self.y = self.function.apply(x)
        return self.y

    def backward(self, d: Tensor) -> Tensor:
        return self.function.backward(d, self.y)


@dataclass(frozen=True)
class LayerPlan:
    """A layer by the names of its tensors and its settings."""

    kind: type[Layer]
    names: tuple[str, ...] = ()
    settings: tuple[Any, ...] = ()

    def layer(self, p: Parameters) -> Layer:
        """The layer with these tensors."""
        return self.kind(*(p[name] for name in self.names), *self.settings)


ChainPlan: TypeAlias = tuple[LayerPlan, ...]
"""A chain of layers."""


@dataclass(frozen=True)
class LayeredPlan:
    """A network as stages, each a chain of layers, and the chain of each one's exit.

    Args:
        stages: their layers; a network without exits is one stage.
        exits: those of the exits, as many; a network without exits has an empty one.
        stacks: whether outputs are those of all exits, stacked.
        flattens: whether it flattens samples first.
    """

    stages: tuple[ChainPlan, ...]
    exits: tuple[ChainPlan, ...]
    stacks: bool
    flattens: bool

    @cached_property
    def layers(self) -> list[LayerPlan]:
        """All of them."""
        return [layer for chain in (*self.stages, *self.exits) for layer in chain]

    @cached_property
    def normalises(self) -> bool:
        """Whether it has BatchNorm layers."""
        return any(layer.kind is BatchNorm for layer in self.layers)

    def takes(self, batch: Batch) -> bool:
        """Whether passes are defined for such a batch."""
        x = batch.inputs
        if not isinstance(x, Tensor) or not (x.ndim == 2 or (self.flattens and x.ndim > 2)):
            return False
        several = batch.seed is not None and len(x) > 1 and x.device.type == "cpu"
        return several or not self.normalises


class LayeredNet:
    """The network of a plan with these tensors, by name.

    With ``lr``, backward passes include the steps of matrices (:meth:`Layer.fuse`).
    """

    def __init__(self, plan: LayeredPlan, p: Parameters, lr: float | None = None) -> None:
        self._stacks = plan.stacks
        self._stages, self._exits = (
            [[layer.layer(p) for layer in chain] for chain in chains]
            for chains in (plan.stages, plan.exits)
        )
        self._layers = [layer for chain in (*self._stages, *self._exits) for layer in chain]
        first = next(iter(self._layers), None)
        if isinstance(first, Dense):
            first.is_first = True
        if lr is not None:
            for layer in self._layers:
                layer.fuse(lr)

    @property
    def trained(self) -> list[Tensor]:
        """Its parameters whose steps are not part of backward passes."""
        return [own for layer in self._layers for own in layer.trained]

    @property
    def gradients(self) -> list[Tensor]:
        """Those of the last backward pass, in the same order."""
        return [own for layer in self._layers for own in layer.gradients]

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs."""
        x, outputs = inputs.flatten(1), []
        for stage, leave in zip(self._stages, self._exits, strict=True):
            x = _forward(stage, x)
            outputs.append(_forward(leave, x))
        return torch.stack(outputs) if self._stacks else outputs[0]

    def backward(self, d: Tensor) -> None:
        """The gradients of the last forward pass, from the derivative by its outputs."""
        by_outputs = d.unbind() if self._stacks else (d,)
        above: Tensor | None = None  # the derivative by a stage's features, from later stages
        for i in reversed(range(len(self._stages))):
            own = _backward(self._exits[i], by_outputs[i])
            above = _backward(self._stages[i], own if above is None else own + above)


def layered_plan(
    module: nn.Module, names: Mapping[str, int], evaluated: Collection[str]
) -> LayeredPlan | None:
    """The module as such a network; None if it is not one.

    Args:
        module: the network.
        names: of its trainable parameters and tracked statistics; tied ones have one number.
        evaluated: the layers that stay in evaluation mode.
    """
    stages: list[tuple[nn.Module, str]] = [(module, "")]
    exits: list[tuple[nn.Module, str]] = [(nn.Identity(), "")]
    if isinstance(module, FirstExits) and (lists := exit_lists(module.module)):
        stages, exits = (
            [(own, f"module.{kind}.{i}.") for i, own in enumerate(each[: module.depth])]
            for kind, each in zip(("stages", "exits"), lists, strict=True)
        )
    try:
        chains = [tuple(tuple(_layers(*own)) for own in each) for each in (stages, exits)]
    except _OtherLayerError:
        return None
    stacks, flattens = isinstance(module, FirstExits), _flattens_first(stages[0][0])
    plan = LayeredPlan(chains[0], chains[1], stacks, flattens)
    found = [name for layer in plan.layers for name in layer.names]
    complete = sorted(found) == sorted(names) and len(set(names.values())) == len(names)
    norms = {layer.names[0] for layer in plan.layers if layer.kind is BatchNorm}
    frozen = norms & {f"{name}.weight".lstrip(".") for name in evaluated}
    return plan if complete and not frozen else None


class _OtherLayerError(Exception):
    """A layer can't be part of such a network."""


def _layers(module: nn.Module, prefix: str) -> Iterator[LayerPlan]:
    """The layers of a chain."""
    if has_hooks(module):
        raise _OtherLayerError
    if type(module) in CONTAINERS:
        for name, child in module._modules.items():  # one may be there several times
            yield from _layers(child or nn.Identity(), f"{prefix}{name}.")
    elif type(module) is nn.Linear:
        yield LayerPlan(Dense, tuple(f"{prefix}{name}" for name, _ in module.named_parameters()))
    elif type(module) is nn.BatchNorm1d:
        names = tuple(f"{prefix}{name}" for name in ("weight", "bias", *STATISTICS))
        yield LayerPlan(BatchNorm, names, (module.momentum, module.eps))
    elif type(module) in ACTIVATIONS:
        yield LayerPlan(Elementwise, settings=(ACTIVATIONS[type(module)],))
    elif type(module) is not nn.Identity and not _flattens(module):
        raise _OtherLayerError


def _flattens_first(module: nn.Module) -> bool:
    layers = (m for m in module.modules() if type(m) not in (*CONTAINERS, nn.Identity))
    return _flattens(next(layers, module))


def _flattens(module: nn.Module) -> bool:
    """Whether it only flattens samples, which is done before the first layer."""
    return isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1)


def _forward(layers: Iterable[Layer], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer.forward(x)
    return x


def _backward(layers: Sequence[Layer], d: Tensor) -> Tensor:
    for layer in reversed(layers):
        d = layer.backward(d)
    return d
