"""The gradient of one perceptron in closed form, in the operations that autograd would call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nufed.objective.loss_gradient import cross_entropy_gradient
from nufed.objective.perceptron import Activation, Parameters, Perceptron, is_in, product_into


class SingleGradient:
    """Writes the gradient on a batch into given tensors, with the bits of autograd's.

    It is made once for the batches of a loop; the values of the parameters may change in between.

    Args:
        net: the perceptron.
        p: its parameters.
        into: where the derivatives are written; those of tensors that it lacks are not computed.
    """

    def __init__(self, net: Perceptron, p: Parameters, into: Parameters) -> None:
        self._net, self._passes = net, net.single_passes(p)
        self._lowest = next(i for i, link in enumerate(net.links) if is_in(link, into))
        self._links = [
            link
            if isinstance(link, Activation)
            else _Layer(
                p[link.weight],
                p[link.bias] if link.bias else None,
                into.get(link.weight),
                into.get(link.bias or ""),
            )
            for link in net.links
        ]

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Write the gradient; returns the inputs of the head."""
        xs, d = self._passed(inputs, targets)
        for i in range(len(self._links) - 1, self._lowest - 1, -1):
            link = self._links[i]
            if isinstance(link, Activation):
                d = link.backward(d, xs[i + 1])
                continue
            if link.by_weight is not None:
                product_into(link.by_weight, d.t(), xs[i])
            if link.by_bias is not None:
                torch.sum(d, dim=0, out=link.by_bias)
            if i > self._lowest:
                d = torch.mm(d, link.weight)
        return xs[self._net.head]

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> None:
        """Subtract lr times the gradient from the parameters, each matrix in one operation with
        the product that is its gradient; to rounding the same as a gradient and a step."""
        xs, d = self._passed(inputs, targets)
        for i in range(len(self._links) - 1, -1, -1):
            link = self._links[i]
            if isinstance(link, Activation):
                d = link.backward(d, xs[i + 1])
                continue
            above, d = d, torch.mm(d, link.weight) if i > self._lowest else d
            link.weight.addmm_(above.t(), xs[i], alpha=-lr)
            if link.bias is not None:
                link.bias.sub_(above.sum(dim=0), alpha=lr)

    def _passed(self, inputs: Tensor, targets: Tensor) -> tuple[list[Tensor], Tensor]:
        """The inputs of all links and the outputs, and the derivative by the latter."""
        xs, shift = [inputs.flatten(1)], self._net.shift
        for function in self._passes:
            xs.append(function(xs[-1]))
        outputs = xs[-1] if shift is None else xs[-1] + shift
        return xs, cross_entropy_gradient(outputs, targets)


@dataclass(frozen=True)
class _Layer:
    """A linear layer, and where derivatives are written; None: they are not wanted."""

    weight: Tensor
    bias: Tensor | None
    by_weight: Tensor | None
    by_bias: Tensor | None
