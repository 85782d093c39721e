"""Fine-tuning of a perceptron's head alone: one pass of the body for all batches.

Where steps change the head alone (ANIL), all iterates have the same body, so the head's inputs are
computed once, for the samples of all batches together. A gradient, and the Hessian's product with a
direction in the head, are then given by the head's numbers and by derivatives with respect to the
head's inputs, one row per sample. The body's numbers are linear in these rows: one backward pass at
the end serves the sum of a gradient and products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nufed.objective.linearized import Linearized
from nufed.objective.parts import Part
from nufed.objective.perceptron import Activation, Linear, Parameters, Perceptron, product_into

if TYPE_CHECKING:
    from nufed.objective.objective import Objective


class HeadBatch(NamedTuple):
    """A batch as places of its samples among those of all batches."""

    places: slice
    targets: Tensor


@dataclass(frozen=True)
class HeadVector:
    """A vector for meta-gradients: a direction, or a point, of which the head alone counts.

    It replaces a tensor in their arithmetic: sums, and multiples by numbers.

    Args:
        head: the numbers in the head.
        rows: the places of some samples, the derivatives with respect to what the head gets for
            them, and a factor of these; the sum of all such terms counts.
    """

    head: Tensor
    rows: tuple[tuple[slice, Tensor, float], ...] = ()

    def __add__(self, other: HeadVector) -> HeadVector:
        return HeadVector(self.head + other.head, self.rows + other.rows)

    def __mul__(self, factor: float) -> HeadVector:
        rows = tuple((at, d, factor * own) for at, d, own in self.rows)
        return HeadVector(self.head * factor, rows)


@dataclass(frozen=True)
class HeadObjective:
    """The objective on some batches as a function of the head, with gradients by all parameters.

    Args:
        base: the objective on the module's own parameters.
        net: the perceptron that it is.
        part: the head.
        w: the vector whose body it has.
        named: gives the parameters in a vector by name.
        inputs: of all batches.
    """

    base: Objective
    net: Perceptron
    part: Part
    w: Tensor
    named: Callable[[Tensor], Parameters]
    inputs: Tensor

    def start(self) -> HeadVector:
        """The point w."""
        return HeadVector(self.part.take(self.w))

    def grad(self, w: HeadVector, batch: HeadBatch) -> HeadVector:
        """∇f(w, batch)."""
        at, gradient = self._linearized(w, batch), torch.empty_like(w.head)
        at.gradient(self._of_head(gradient))
        return HeadVector(gradient, ((batch.places, at.by_inputs(), 1.0),))

    def hvp(self, w: HeadVector, batch: HeadBatch, v: HeadVector) -> HeadVector:
        """∇²f(w, batch)·v, with v taken as 0 outside the head."""
        at, product = self._linearized(w, batch), torch.empty_like(w.head)
        rows = at.product(self._of_head(v.head), self._of_head(product), by_inputs=True)
        assert rows is not None
        return HeadVector(product, ((batch.places, rows, 1.0),))

    def flat(self, direction: HeadVector) -> Tensor:
        """A direction as a vector like w."""
        vector, end = torch.empty_like(self.w), max(at.stop for at, *_ in direction.rows)
        self.part.fill(vector, direction.head)
        d = torch.zeros_like(self._xs[-1][:end])
        for at, rows, factor in direction.rows:
            d[at].add_(rows, alpha=factor)
        p, into = self.named(self.w), self.named(vector)
        xs, links = [x[:end] for x in self._xs], self.net.body_and_head[0].links
        for i, link in reversed(list(enumerate(links))):
            if isinstance(link, Activation):
                d = link.backward(d, xs[i + 1])
                continue
            product_into(into[link.weight], d.t(), xs[i])
            if link.bias:
                torch.sum(d, dim=0, out=into[link.bias])
            if any(isinstance(lower, Linear) for lower in links[:i]):
                d = torch.mm(d, p[link.weight])
        return vector

    @cached_property
    def _xs(self) -> list[Tensor]:
        """The inputs of the body's links, and of the head."""
        return self.net.body_and_head[0].single_forward(self.named(self.w), self.inputs)

    def _linearized(self, w: HeadVector, batch: HeadBatch) -> Linearized:
        features = self._xs[-1][batch.places]
        return Linearized(self.net.body_and_head[1], self._of_head(w.head), features, batch.targets)

    def _of_head(self, head: Tensor) -> Parameters:
        """The head's parameters by name, from its numbers."""
        link = self.net.links[self.net.head]
        assert isinstance(link, Linear)
        inputs = self._xs[-1].shape[1]
        outputs = len(head) // (inputs + bool(link.bias))
        found = {link.weight: head[: outputs * inputs].view(outputs, inputs)}
        return found | {link.bias: head[outputs * inputs :]} if link.bias else found
