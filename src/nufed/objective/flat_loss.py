"""The loss of a module as a function of one flat vector, and its derivatives at one vector."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, compress
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nufed.errors import InputError
from nufed.objective.batch import AnyBatch, Batch, Loss
from nufed.objective.flat_module import FlatModule
from nufed.objective.layered_net import layered_plan
from nufed.objective.linearized import Linearized
from nufed.objective.modules import RunningStats, cast_like, is_zero
from nufed.objective.parts import Part, part_of
from nufed.objective.perceptron import Parameters, perceptron
from nufed.objective.single_gradient import SingleGradient
from nufed.objective.stack import stacked_losses

if TYPE_CHECKING:
    from nufed.objective.objective import Objective

PLAIN_LOSSES: tuple[object, ...] = (
    F.cross_entropy,
    F.mse_loss,
    F.nll_loss,
    F.l1_loss,
    F.huber_loss,
)
"""Losses that draw no random numbers."""
FEW = 2**20  # numbers of which a second copy does not matter
LevelKey: TypeAlias = tuple[tuple[Fraction, ...], tuple[int, ...], int]
"""Widths and depths of capacity levels, and one of them."""


class FlatLoss(FlatModule):
    """f(w, batch), and its gradient and Hessian-vector products at one vector w.

    Arguments and conventions are those of :class:`~nufed.objective.Objective`, which adds stacks of
    vectors and variants of itself.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss = F.cross_entropy,
        *,
        running_stats: RunningStats = "refuse",
    ) -> None:
        super().__init__(module, running_stats)
        self._loss_function = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
        self._plain_loss = loss in PLAIN_LOSSES
        self._chain = perceptron(self._module, self._loss_function)
        self._plan = layered_plan(self._module, self._names, self._always_evaluated)
        self._narrow: dict[LevelKey, tuple[Objective, Part]] = {}
        # of a capacity level: shapes, strides and offsets of its tensors in the whole vector
        self._inside: dict[str, tuple[Sequence[int], Sequence[int], int]] = {}

    def _draws_nothing(self) -> bool:
        return self._plain_loss and super()._draws_nothing()

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the loss is torch's cross-entropy."""
        return self._loss_function is F.cross_entropy

    def value(self, w: Tensor, batch: AnyBatch) -> Tensor:
        """f(w, batch), a scalar tensor; for a stack, one value per row."""
        with torch.no_grad():
            return self.forward(w, batch)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of outputs that :meth:`predict` gave, a scalar tensor."""
        loss = self._loss_function(outputs, cast_like(targets, self._like))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"the loss returned {given}: it must return one number as a tensor")
        return loss.reshape(()) if loss.ndim else loss

    def forward(self, w: Tensor, batch: AnyBatch) -> Tensor:
        """f(w, batch) like :meth:`value`, with autograd's graph."""
        self._check_vector(w)
        return self._forward(self._views(w), batch, stacked=w.ndim > 1)

    def _forward(self, views: Sequence[Tensor], batch: AnyBatch, stacked: bool) -> Tensor:
        """f of the parameter tensors."""
        batch = Batch(*batch)
        with self._mode(batch.seed):
            outputs = self._outputs(views, batch.inputs, stacked)
            if not stacked:
                return self.loss(outputs, batch.targets)
            targets = cast_like(batch.targets, self._like)
            return stacked_losses(self._loss_function, outputs, targets)

    def single_grad(self, w: Tensor, batch: AnyBatch, part: Part | None = None) -> Tensor:
        """∇f(w, batch) of one vector, or the numbers of it in a part."""
        self._check_vector(w)
        wanted = self._touched(part)
        if not wanted:
            return w.new_empty(0)
        gradient, _ = self._grad(w, Batch(*batch), wanted)
        if part is None or part.size == len(gradient):
            return gradient
        whole = torch.zeros_like(w)
        pieces = torch.split(gradient, [self._sizes[i] for i in wanted])
        for i, piece in zip(wanted, pieces, strict=True):
            torch.split(whole, self._sizes)[i].copy_(piece)
        return part.take(whole)

    def support(self, vector: Tensor) -> Part | None:
        """The tensors in which a vector is not 0 everywhere; None if these are all.

        >>> from nufed import Objective
        >>> objective = Objective(nn.Linear(2, 1))
        >>> objective.support(torch.tensor([0.0, 0.0, 1.0])).index
        slice(2, 3, None)
        """
        ends = list(accumulate(self._sizes, initial=0))
        parts = torch.split(vector, self._sizes)
        moved = [i for i, part in enumerate(parts) if not is_zero(part)]
        if len(moved) == len(self._sizes):
            return None
        return part_of("", [(ends[i], ends[i + 1]) for i in moved])

    def _touched(self, part: Part | None) -> Sequence[int]:
        """The tensors of the vector that have numbers in a part, by their place."""
        if part is None:
            return range(len(self._sizes))
        if part.name not in self._tensors or self._parts.get(part.name) is not part:
            inside = torch.zeros(self.size, dtype=torch.bool)
            inside[part.index] = True
            parts = torch.split(inside, self._sizes)
            self._tensors[part.name] = [i for i, own in enumerate(parts) if own.any()]
        return self._tensors[part.name]

    def gradient_at(self, w: Tensor) -> Callable[[AnyBatch], tuple[Tensor, Tensor | None]]:
        """∇f(w, batch) as a function of the batch, at the values that w has when it is called.

        It also returns what the head gets if that is known, for :meth:`head_grad`. The next call
        may overwrite the gradient.
        """
        self._check_vector(w)
        every = range(len(self._sizes))
        if self._chain is None:
            return lambda batch: self._grad(w, Batch(*batch), every)
        gradient = torch.empty_like(w)
        differentiate = self._closed_form(self._unflatten(w.detach()), self._unflatten(gradient))

        def evaluate(batch: AnyBatch) -> tuple[Tensor, Tensor | None]:
            batch = Batch(*batch)
            if not self._in_closed_form(batch):
                return self._grad(w, batch, every)
            return gradient, differentiate(batch)

        return evaluate

    def head_grad(self, head: Tensor, features: Tensor, targets: Tensor) -> Tensor:
        """The gradient by the head's parameters, from what it gets."""
        assert self._chain is not None
        wanted = self._touched(self.part("head"))
        gradient = torch.empty_like(head)
        p, into = (self._some(vector, wanted) for vector in (head, gradient))
        SingleGradient(self._chain.body_and_head[1], p, into)(features, targets)
        return gradient

    def _some(self, vector: Tensor, wanted: Sequence[int]) -> dict[str, Tensor]:
        """By name the tensors of a vector that holds these tensors alone."""
        if len(wanted) == len(self._sizes):
            return self._unflatten(vector)
        parts = torch.split(vector, [self._sizes[i] for i in wanted])
        views = {i: part.view(self._shapes[i]) for i, part in zip(wanted, parts, strict=True)}
        return {name: views[i] for name, i in self._names.items() if i in views}

    def tensors_in(self, *parts: tuple[Part, Tensor]) -> dict[str, Tensor]:
        """By name all tensors of the vector, as views of the values of parts that make it up."""
        found: dict[str, Tensor] = {}
        for part, values in parts:
            found |= self._some(values, self._touched(part))
        return found

    def _in_closed_form(self, batch: Batch) -> bool:
        """Whether the gradient on such a batch needs no autograd."""
        return self._chain is not None and self._chain.takes(batch.inputs, batch.targets)

    def _closed_form(self, p: Parameters, into: Parameters) -> Callable[[Batch], Tensor]:
        """Writes the gradient on a batch ``into`` tensors; returns what the head gets."""
        assert self._chain is not None
        gradient = SingleGradient(self._chain, p, into)
        return lambda batch: gradient(*self._as_tensors(batch))

    def _as_tensors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a batch for a chain, as the module gets them."""
        inputs = cast_like(cast(Tensor, batch.inputs), self._like)
        return inputs, cast_like(batch.targets, self._like)

    def _length(self, wanted: Sequence[int]) -> int:
        """The numbers in these tensors."""
        whole = len(wanted) == len(self._sizes)
        return self.size if whole else sum(self._sizes[i] for i in wanted)

    def _grad(self, w: Tensor, batch: Batch, wanted: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """The gradient by these tensors, one after another, and what the head gets if known."""
        if self._in_closed_form(batch):
            gradient = w.new_empty(self._length(wanted))
            p, into = self._unflatten(w.detach()), self._some(gradient, wanted)
            return gradient, self._closed_form(p, into)(batch)
        views = self._views(w.detach())
        leaves = [views[i].requires_grad_() for i in wanted]
        with torch.enable_grad():
            loss = self._forward(views, batch, stacked=False)
        if self._statistics:
            self._moved.keep(self._last_statistics, w, batch)
        return _joined(self._by(leaves, loss)), None

    def _by(self, leaves: list[Tensor], loss: Tensor) -> tuple[Tensor, ...]:
        """The gradients of a loss by some tensors of the vector."""
        if len(leaves) >= len(self._sizes) - len(self._statistics):
            differentiable(loss)
        elif not loss.requires_grad:
            return tuple(torch.zeros_like(leaf) for leaf in leaves)
        return torch.autograd.grad(loss, leaves, materialize_grads=True)

    def single_hvp(self, w: Tensor, batch: AnyBatch, v: Tensor, part: Part | None = None) -> Tensor:
        """∇²f(w, batch)·v of one vector, with v taken as 0 outside a part."""
        try:
            return self._hvp(w, batch, v, part)
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            # fused attention has no second derivative; its unfused form has one
            with sdpa_kernel(SDPBackend.MATH):
                return self._hvp(w, batch, v, part)

    def _hvp(self, w: Tensor, batch: AnyBatch, v: Tensor, part: Part | None) -> Tensor:
        self._check_vector(w)
        # tensors in which v is 0 add nothing, and need no gradient
        directions = self._directions(v, part)
        if not directions:
            return torch.zeros_like(w)
        batch = Batch(*batch)
        if self._in_closed_form(batch):
            own = {name: directions[i] for name, i in self._names.items() if i in directions}
            return self._product(self._linearized(w, batch), own)
        leaves = [view.requires_grad_() for view in self._views(w.detach())]
        with torch.enable_grad():
            gradients = self._graph(leaves, batch, list(directions))
            # a loss that is linear in a parameter has a gradient that does not depend on it
            used = [g.requires_grad for g in gradients]
            if not any(used):
                return torch.zeros_like(w)
            wanted, against = (
                list(compress(these, used)) for these in (gradients, directions.values())
            )
            del gradients
            return _joined(torch.autograd.grad(wanted, leaves, against, materialize_grads=True))

    def _directions(self, v: Tensor, part: Part | None) -> dict[int, Tensor]:
        """The tensors of v that are not 0, by their place, with v taken as 0 outside a part."""
        if part is None:
            return {i: d for i, d in enumerate(self._views(v)) if not is_zero(d)}
        touched = self._touched(part)
        views = self._views(v if part.size == self._length(touched) else part.only(v))
        return {i: views[i] for i in touched}

    def _linearized(self, w: Tensor, batch: Batch) -> Linearized:
        """The derivatives at w in closed form."""
        assert self._chain is not None
        return Linearized(self._chain, self._unflatten(w.detach()), *self._as_tensors(batch))

    def _product(self, at: Linearized, v: Parameters) -> Tensor:
        product = self._like.new_empty(self.size)
        at.product(v, self._unflatten(product))
        return product

    def _graph(
        self, leaves: list[Tensor], batch: AnyBatch, wanted: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """The gradients by some leaves, in autograd's graph."""
        loss = differentiable(self._forward(leaves, batch, stacked=False))
        own = [leaves[i] for i in wanted]
        return torch.autograd.grad(loss, own, create_graph=True, materialize_grads=True)

    def linearized(self, w: Tensor, batch: AnyBatch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """∇f(w, batch), and the function v ↦ ∇²f(w, batch)·v.

        One graph of the gradient serves all products, and takes memory as long as the function is
        there; :meth:`hvp` makes one for each product.
        """
        self._check_vector(w)
        batch = Batch(*batch)
        if self._in_closed_form(batch):
            at, gradient = self._linearized(w, batch), torch.empty_like(w)
            at.gradient(self._unflatten(gradient))
            return gradient, lambda v: self._product(at, self._unflatten(v))
        leaves = [view.requires_grad_() for view in self._views(w.detach())]
        with torch.enable_grad():
            gradients = self._graph(leaves, batch, range(len(leaves)))
        used = [g.requires_grad for g in gradients]
        wanted = list(compress(gradients, used))

        def product(v: Tensor) -> Tensor:
            against = list(compress(self._views(v), used))
            if not wanted:
                return torch.zeros_like(w)
            try:
                return _joined(
                    torch.autograd.grad(
                        wanted, leaves, against, retain_graph=True, materialize_grads=True
                    )
                )
            except RuntimeError:  # an operation without a second derivative: hvp may replace it
                return self.single_hvp(w, batch, v)

        return _joined(tuple(g.detach() for g in gradients)), product


def _joined(tensors: tuple[Tensor, ...]) -> Tensor:
    """The concatenation; each tensor is freed once copied, so that memory holds one copy."""
    if sum(tensor.numel() for tensor in tensors) <= FEW:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    waiting = deque(tensors)
    del tensors
    vector = waiting[0].new_empty(sum(tensor.numel() for tensor in waiting))
    start = 0
    while waiting:
        part = waiting.popleft().reshape(-1)
        vector[start : start + len(part)] = part
        start += len(part)
    return vector


def differentiable(loss: Tensor) -> Tensor:
    if not loss.requires_grad:
        raise InputError(
            "the loss does not depend on the parameters in a way that can be differentiated: "
            "the module or the loss may detach, use no_grad, or leave torch"
        )
    return loss
