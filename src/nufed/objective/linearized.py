"""Hessian-vector products of one perceptron in closed form.

As in :meth:`nufed.objective.perceptron.Perceptron.product`, tangents ẋ of every x and ḋ of every d
are taken along the direction, but without a stack, and in the operations that autograd would call.
Tensors in which the direction is 0 add no terms. One forward pass serves the gradient and all
products at a vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nufed.objective.loss_gradient import log_softmax_backward, nll_gradients
from nufed.objective.perceptron import Activation, Parameters, Perceptron, is_in, product_into


class Linearized:
    """The gradient of a perceptron at one vector and batch, and products with its Hessian there.

    Args:
        net: the perceptron.
        p: its parameters.
        inputs: of the batch.
        targets: of the batch.
    """

    def __init__(self, net: Perceptron, p: Parameters, inputs: Tensor, targets: Tensor) -> None:
        self._links, self._p = net.links, p
        self._xs = net.single_forward(p, inputs.flatten(1))
        outputs = self._xs[-1] if net.shift is None else self._xs[-1] + net.shift
        self._logs = logs = torch.log_softmax(outputs, dim=1)
        (self._by_logs,) = nll_gradients((logs,), targets, (1.0,))
        d = log_softmax_backward(self._by_logs, logs, 1, logs.dtype)
        self._ds: dict[int, Tensor] = {len(self._links) - 1: d}

    def gradient(self, into: Parameters) -> None:
        """Write the gradient ``into`` place."""
        for i, link in enumerate(self._links):
            if isinstance(link, Activation):
                continue
            product_into(into[link.weight], self._d(i).t(), self._xs[i])
            if link.bias:
                torch.sum(self._d(i), dim=0, out=into[link.bias])

    def by_inputs(self) -> Tensor:
        """The gradient with respect to the inputs."""
        return self._d(-1)

    def product(self, v: Parameters, into: Parameters, by_inputs: bool = False) -> Tensor | None:
        """Write the Hessian's product with v, which is 0 in the tensors that it lacks, likewise.

        Returns the derivative of :meth:`by_inputs` along v, if it is wanted.
        """
        dots = self._tangents(v)
        bent = -self._by_logs.sum(dim=1, keepdim=True) * self._logs.exp()
        bent = bent * dots[len(self._links)]
        # ḋ is the sum of these terms, in autograd's order, on which its bits depend
        terms = [log_softmax_backward(bent, self._logs, 1, bent.dtype)]
        first = (
            0 if by_inputs else min(i for i, link in enumerate(self._links) if is_in(link, into))
        )
        for i in range(len(self._links) - 1, first - 1, -1):
            link, x, dot = self._links[i], self._xs[i], dots.get(i)
            if isinstance(link, Activation):
                if link.by_value and dot is not None:
                    terms = [link.by_value(self._d(i), self._xs[i + 1], dot), *terms]
                terms = [link.backward(_sum(terms), self._xs[i + 1])]
                continue
            d_dot = _sum(terms)
            if dot is None:
                product_into(into[link.weight], d_dot.t(), x)
            else:
                into[link.weight].copy_(torch.mm(d_dot.t(), x).add_(torch.mm(self._d(i).t(), dot)))
            if link.bias:
                torch.sum(d_dot, dim=0, out=into[link.bias])
            if i > first or by_inputs:
                terms = [torch.mm(d_dot, self._p[link.weight])]
                if link.weight in v:
                    terms = [torch.mm(self._d(i), v[link.weight]), *terms]
        return _sum(terms) if by_inputs else None

    def _tangents(self, v: Parameters) -> dict[int, Tensor]:
        """The tangents of the inputs of links, and of the outputs, as far as they are not 0."""
        dots: dict[int, Tensor] = {}
        for i, link in enumerate(self._links):
            dot = dots.get(i)
            if isinstance(link, Activation):
                if dot is not None:
                    dots[i + 1] = link.backward(dot, self._xs[i + 1])
                continue
            terms = []
            if link.weight in v:
                terms.append(torch.mm(self._xs[i], v[link.weight].t()))
            if link.bias and link.bias in v:
                terms.append(v[link.bias].expand(len(self._logs), -1))
            if dot is not None:
                terms.append(torch.mm(dot, self._p[link.weight].t()))
            if terms:
                dots[i + 1] = _sum(terms)
        return dots

    def _d(self, i: int) -> Tensor:
        """The derivative with respect to the outputs of link i."""
        if i not in self._ds:
            d, link = self._d(i + 1), self._links[i + 1]
            if isinstance(link, Activation):
                self._ds[i] = link.backward(d, self._xs[i + 2])
            else:
                self._ds[i] = torch.mm(d, self._p[link.weight])
        return self._ds[i]


def _sum(terms: list[Tensor]) -> Tensor:
    return sum(terms[1:], start=terms[0])
