"""The gradient of one perceptron in closed form, in the operations that autograd would call."""

from __future__ import annotations

import torch
from torch import Tensor

from nufed.objective.loss_gradient import cross_entropy_gradient
from nufed.objective.perceptron import (
    Activation,
    Linear,
    Parameters,
    Perceptron,
    is_in,
    product_into,
)


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
        self._tensors = {
            i: (p[link.weight], into.get(link.weight), into.get(link.bias or ""))
            for i, link in enumerate(net.links)
            if isinstance(link, Linear)
        }

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Write the gradient; returns the inputs of the head."""
        xs, links, lowest = [inputs.flatten(1)], self._net.links, self._lowest
        for function in self._passes:
            xs.append(function(xs[-1]))
        shift = self._net.shift
        d = cross_entropy_gradient(xs[-1] if shift is None else xs[-1] + shift, targets)
        for i in range(len(links) - 1, lowest - 1, -1):
            link = links[i]
            if isinstance(link, Activation):
                d = link.backward(d, xs[i + 1])
                continue
            weight, by_weight, by_bias = self._tensors[i]
            if by_weight is not None:
                product_into(by_weight, d.t(), xs[i])
            if by_bias is not None:
                torch.sum(d, dim=0, out=by_bias)
            if i > lowest:
                d = torch.mm(d, weight)
        return xs[self._net.head]
