"""Closed-form derivatives of fully connected networks with cross-entropy, one or a stack of them.

On small networks autograd's overhead dominates. Here a network is a chain of linear layers and
activations. The gradient is a forward pass, then a backward pass of d, the derivative with respect
to a link's outputs. A Hessian-vector product differentiates both passes along the direction, with
tangents ẋ of every x and ḋ of every d (Pearlmutter's R-operator). Of a stack agents are the first
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nufed.objective.modules import has_hooks

Parameters: TypeAlias = Mapping[str, Tensor]
Wide: TypeAlias = Callable[[Tensor, Tensor], Tensor | None]
"""a·b of two large matrices; None of smaller ones."""
aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An elementwise function φ, with its derivatives in terms of its value y = φ(x).

    ``backward(d, y)`` is φ′d and ``bend(y)`` is φ″, None if that is zero.
    """

    apply: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    bend: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class Linear:
    """x ↦ xWᵀ + b, given by the names of its parameters."""

    weight: str
    bias: str | None


ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: Activation(torch.relu, lambda d, y: aten.threshold_backward.default(d, y, 0), None),
    nn.Tanh: Activation(
        torch.tanh,
        aten.tanh_backward.default,
        lambda y: 2 * y * (y * y - 1),
    ),
    nn.Sigmoid: Activation(
        torch.sigmoid,
        aten.sigmoid_backward.default,
        lambda y: y * (1 - y) * (1 - 2 * y),
    ),
}


@dataclass(frozen=True)
class Perceptron:
    """A chain of layers with cross-entropy as the loss.

    Args:
        links: the layers.
        flattens: whether it flattens samples first.
        wide: computes products of a single network that are large; by torch if None.
        shift: is added to the outputs.
    """

    links: tuple[Linear | Activation, ...]
    flattens: bool
    wide: Wide | None = None
    shift: Tensor | None = None

    def gradient(
        self, p: Parameters, inputs: Tensor, targets: Tensor, into: Parameters, by_inputs: bool
    ) -> Tensor | None:
        """Write the gradients of the parameters that are in ``into``; return that of the inputs."""
        xs = self._forward(p, inputs)
        d, _ = self._residual(xs[-1], targets)
        written = {i for i, link in enumerate(self.links) if _among(link, into)}
        first = -1 if by_inputs else min(written, default=len(self.links))
        for i, link in reversed(list(enumerate(self.links))):
            if i < first:
                break
            if isinstance(link, Activation):
                d = link.backward(d, xs[i + 1])
                continue
            if link.weight in into:
                self._times(d.mT, xs[i], into[link.weight])
            if link.bias and link.bias in into:
                torch.sum(d, dim=-2, out=into[link.bias])
            if i > first:
                d = self._times(d, p[link.weight])
        return d if by_inputs else None

    def product(
        self,
        p: Parameters,
        v: Parameters,
        inputs: Tensor,
        change: Tensor | None,
        targets: Tensor,
        into: Parameters,
    ) -> Tensor | None:
        """The derivative of the gradient along v and, if given, along ``change`` of the inputs.

        Parameters that v lacks do not change.
        """
        xs = self._forward(p, inputs)
        dots = [change]  # None: zero, as before the first linear layer unless the inputs change
        for i, link in enumerate(self.links):
            before = dots[i]
            if isinstance(link, Activation):
                dots.append(None if before is None else link.backward(before, xs[i + 1]))
                continue
            dot = self._times(xs[i], v[link.weight].mT) if link.weight in v else None
            if before is not None:
                dot = self._plus(dot, before, p[link.weight].mT)
            if link.bias and link.bias in v:
                bias = v[link.bias].unsqueeze(-2)
                dot = bias.expand(*xs[i].shape[:-1], -1) if dot is None else dot + bias
            dots.append(dot)
        d, outputs = self._residual(xs[-1], targets)
        last = torch.zeros_like(xs[-1]) if dots[-1] is None else dots[-1]
        mean = (outputs * last).sum(dim=-1, keepdim=True)
        d_dot = outputs * (last - mean) / targets.shape[-1]
        for i, link in reversed(list(enumerate(self.links))):
            before = dots[i]
            if isinstance(link, Activation):
                d_dot = link.backward(d_dot, xs[i + 1])
                if link.bend and before is not None:
                    d_dot = d_dot + d * link.bend(xs[i + 1]) * before
                d = link.backward(d, xs[i + 1])
                continue
            of_weight = self._times(d_dot.mT, xs[i], into[link.weight])
            if before is not None:
                self._plus(of_weight, d.mT, before, in_place=True)
            if link.bias:
                torch.sum(d_dot, dim=-2, out=into[link.bias])
            if i or change is not None:
                weight = p[link.weight]
                d_dot = self._times(d_dot, weight)
                if link.weight in v:
                    d_dot = self._plus(d_dot, d, v[link.weight])
                d = self._times(d, weight)
        return None if change is None else d_dot

    def _forward(self, p: Parameters, x: Tensor) -> list[Tensor]:
        """The inputs of every link, and the outputs of the last."""
        xs = [x]
        for link in self.links:
            if isinstance(link, Activation):
                x = link.apply(x)
            else:
                bias = p[link.bias].unsqueeze(-2) if link.bias else None
                x = self._plus(bias, x, p[link.weight].mT)
            xs.append(x)
        return xs

    def _times(self, a: Tensor, b: Tensor, into: Tensor | None = None) -> Tensor:
        """a·b, of one network or of a stack."""
        if a.ndim == 3:
            return torch.bmm(a, b, out=into)
        large = self.wide and self.wide(a, b)
        if large is None:
            return torch.mm(a, b, out=into)
        return large if into is None else into.copy_(large)

    def _plus(self, c: Tensor | None, a: Tensor, b: Tensor, in_place: bool = False) -> Tensor:
        """c + a·b, or only a·b without a c; ``in_place``: written into c."""
        if c is None:
            return self._times(a, b)
        into = c if in_place else None
        if a.ndim == 3:
            return torch.baddbmm(c, a, b, out=into)
        large = self.wide and self.wide(a, b)
        if large is None:
            return torch.addmm(c, a, b, out=into)
        return torch.add(large, c, out=into)

    def _residual(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the mean cross-entropy in the outputs, and their softmax."""
        outputs = outputs if self.shift is None else outputs + self.shift
        softmax = torch.softmax(outputs, dim=-1)
        ones = targets.unsqueeze(-1)
        residual = softmax.scatter_add(-1, ones, softmax.new_full((), -1.0).expand(ones.shape))
        return residual.div_(targets.shape[-1]), softmax


def faster(module: nn.Module, loss: object) -> Perceptron | None:
    """Faster derivatives for this module and loss, if there are any, else None.

    There are if the module is a chain of linear layers and activations and the loss cross-entropy.
    """
    if loss is not F.cross_entropy:
        return None
    links = list(_links(module, ""))
    names = [n for link in links if isinstance(link, Linear) for n in (link.weight, link.bias) if n]
    every = dict(module.named_parameters(remove_duplicate=False))
    used = {name: p for name, p in every.items() if p.numel()}
    complete = set(names) == set(used) and len({id(p) for p in used.values()}) == len(names)
    trainable = all(p.requires_grad for p in used.values())
    if None in links or not complete or not trainable:
        return None
    layers = [m for m in module.modules() if not isinstance(m, nn.Sequential | nn.Identity)]
    flattens = bool(layers) and _flattens(layers[0])
    return Perceptron(tuple(link for link in links if link is not None), flattens)


def _links(module: nn.Module, prefix: str) -> Iterator[Linear | Activation | None]:
    """The links of a module; None for a layer that can't be one."""
    if has_hooks(module):
        yield None
    elif type(module) is nn.Sequential:
        for name, child in module._modules.items():  # named_children() gives repeated ones once
            yield from _links(child or nn.Identity(), f"{prefix}{name}.")
    elif type(module) is nn.Linear:
        yield Linear(f"{prefix}weight", f"{prefix}bias" if module.bias is not None else None)
    elif type(module) in ACTIVATIONS:
        yield ACTIVATIONS[type(module)]
    elif not (type(module) is nn.Identity or _flattens(module)):
        yield None


def _flattens(module: nn.Module) -> bool:
    """Whether it only flattens samples, which is done before the chain."""
    return isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1)


def _among(link: Linear | Activation, names: Parameters) -> bool:
    """Whether a parameter of this link is among the names."""
    return isinstance(link, Linear) and (link.weight in names or link.bias in names)
