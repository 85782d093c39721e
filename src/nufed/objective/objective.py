"""An ``nn.Module`` and a loss as functions of one flat parameter vector."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nufed.errors import InputError, require
from nufed.objective.batch import AnyBatch, Batch, Inputs, Loss
from nufed.objective.exits import FirstExits
from nufed.objective.flat_module import FlatModule
from nufed.objective.modules import RunningStats, cast_like
from nufed.objective.perceptron import perceptron
from nufed.objective.stack import stacked_losses


class Objective(FlatModule):
    """The loss of a module on a batch, as a function f(w, batch) of its flat parameters w.

    The vector holds every trainable parameter once (tied weights are one parameter, frozen ones
    are excluded), in the order of ``module.named_parameters()``. All methods are pure: they change
    neither w nor the module, of which the objective keeps its own copy.

    All of them also take a stack of vectors, one row per agent, with batches stacked the same way,
    and then give one result per row (:mod:`nufed.objective.stack`).

    Args:
        module: any ``nn.Module`` with trainable floating-point parameters of one dtype.
        loss: ``loss(outputs, targets) -> scalar``; cross-entropy by default.
        running_stats: how to treat layers with running statistics (BatchNorm).
            ``"refuse"`` raises; ``"frozen"`` always uses the statistics stored in the module and
            never changes them; ``"tracked"`` makes them coordinates of the flat vector, after the
            parameters: training normalises by the batch and updates them (:meth:`track`), and the
            algorithm decides whether they are averaged (as by FedAvg) or private (FedBN).

    >>> objective = Objective(nn.Linear(2, 1, bias=False), F.mse_loss)
    >>> w = torch.tensor([1.0, 2.0])
    >>> batch = (torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0]]))
    >>> objective.value(w, batch), objective.grad(w, batch)
    (tensor(9.), tensor([6., 6.]))
    >>> objective.hvp(w, batch, torch.tensor([1.0, 0.0]))
    tensor([2., 2.])
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
        self._chain = perceptron(self._module, self._loss_function)

    @cached_property
    def double(self) -> Objective:
        """The same objective in float64; it casts its batches.

        It stores no parameters: every call passes them to its module.
        """
        double = copy.copy(self)
        double._exits = {}
        double._like = self._like.double()
        zero = double._like.new_zeros(())
        stand_ins = {
            id(p): nn.Parameter(zero.expand(p.shape))
            for n, p in self._module.named_parameters()
            if n in self._names
        }
        double._module = copy.deepcopy(self._module, stand_ins).double()
        if isinstance(self._loss_function, nn.Module):
            double._loss_function = copy.deepcopy(self._loss_function).double()
        double._chain = perceptron(double._module, double._loss_function)
        return double

    def with_module(self, module: nn.Module) -> Objective:
        """The objective of another module with the same loss."""
        return Objective(module, self._loss_function, running_stats=self._running_stats)

    def with_loss(self, loss: Loss) -> Objective:
        """The objective of the same module with another loss."""
        other = copy.copy(self)
        other.__dict__.pop("double", None)
        other._loss_function = loss
        other._chain = perceptron(other._module, loss)
        return other

    def with_exits(self, depth: int, loss: Loss | None = None) -> Objective:
        """An objective on the same vector with the outputs of the first ``depth`` exits.

        Outputs and the argument of ``loss`` have the shape (exits, samples, …). Not defined for a
        module with several inputs.
        """
        if depth not in self._exits:
            shared = {id(t): t for t in chain(self._module.parameters(), self._module.buffers())}
            self._exits[depth] = FirstExits(copy.deepcopy(self._module, shared), depth)
        other = self.with_loss(loss or self._loss_function)
        other._module, other._parts = self._exits[depth], {}
        other._names = {f"module.{name}": place for name, place in self._names.items()}
        other._statistics = {f"module.{name}": i for name, i in self._statistics.items()}
        other._always_evaluated = [f"module.{name}" for name in self._always_evaluated]
        other._chain = None
        other._set_training(False)
        return other

    @property
    def base(self) -> Objective:
        """Itself: this is the objective on the module's own parameters."""
        return self

    def norm(self, w: Tensor) -> Tensor:
        """‖w‖; for a stack, one per row."""
        norm: Tensor = torch.linalg.vector_norm(w, dim=-1, keepdim=w.ndim > 1)
        return norm

    def value(self, w: Tensor, batch: AnyBatch) -> Tensor:
        """f(w, batch), a scalar tensor; for a stack, one value per row."""
        with torch.no_grad():
            return self.forward(w, batch)

    def grad(self, w: Tensor, batch: AnyBatch) -> Tensor:
        """∇f(w, batch)."""
        if w.ndim > 1:
            return self.stacked_grad(w, batch)[0]
        self._check_vector(w)
        leaves = [view.requires_grad_() for view in self._views(w.detach())]
        with torch.enable_grad():
            loss = _differentiable(self._forward(leaves, batch, stacked=False))
            return _joined(torch.autograd.grad(loss, leaves, materialize_grads=True))

    def hvp(self, w: Tensor, batch: AnyBatch, v: Tensor) -> Tensor:
        """∇²f(w, batch)·v, by differentiating ⟨∇f, v⟩; the Hessian is never formed."""
        require(v.shape == w.shape, "v", tuple(v.shape), f"must have the shape of w, {w.shape}")
        if w.ndim > 1:
            return self.stacked_hvp(w, batch, v)[0]
        try:
            return self._hvp(w, batch, v)
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            # fused attention has no second derivative; its unfused form has one
            with sdpa_kernel(SDPBackend.MATH):
                return self._hvp(w, batch, v)

    def _hvp(self, w: Tensor, batch: AnyBatch, v: Tensor) -> Tensor:
        self._check_vector(w)
        leaves = [view.requires_grad_() for view in self._views(w.detach())]
        directions = self._views(v)
        with torch.enable_grad():
            loss = _differentiable(self._forward(leaves, batch, stacked=False))
            gradients = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
            # a loss that is linear in a parameter has a gradient that does not depend on it
            used = [i for i, g in enumerate(gradients) if g.requires_grad]
            if not used:
                return torch.zeros_like(w)
            wanted, against = ([these[i] for i in used] for these in (gradients, directions))
            del gradients
            return _joined(torch.autograd.grad(wanted, leaves, against, materialize_grads=True))

    def beside(
        self, w: Tensor, batch: AnyBatch, v: Tensor, step: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """∇f(w+δv) and ∇f(w−δv) with δ = ``step``, in this objective's precision.

        Both see the same batch and the same dropout masks.
        """
        # δv is computed twice to save memory
        ahead = self.grad(w.to(self.dtype) + v.to(self.dtype) * step, batch)
        behind = self.grad(w.to(self.dtype) - v.to(self.dtype) * step, batch)
        return ahead, behind

    def stacked_grad(
        self, w: Tensor, batch: AnyBatch, by_inputs: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of a stack, and optionally those with respect to the inputs (a tensor)."""
        batch = Batch(*batch)
        if self._chain is not None:
            gradient = torch.empty_like(w)
            inputs = self._chain.gradient(
                self._unflatten(w),
                self._flat(batch.inputs),
                batch.targets,
                into=self._unflatten(gradient),
                by_inputs=by_inputs,
            )
            return gradient, inputs
        leaves, leafy = self._leaves(w, batch, by_inputs)
        with torch.enable_grad():
            loss = _differentiable(self.forward(leaves[0], leafy).sum())
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        return gradients[0], gradients[1] if by_inputs else None

    def stacked_hvp(
        self, w: Tensor, batch: AnyBatch, v: Tensor, change: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The Hessian-vector products of a stack; with ``change``, jointly in the inputs."""
        batch = Batch(*batch)
        if self._chain is not None:
            product = torch.empty_like(w)
            inputs = self._chain.product(
                self._unflatten(w),
                self._unflatten(v),
                self._flat(batch.inputs),
                change,
                batch.targets,
                into=self._unflatten(product),
            )
            return product, inputs
        leaves, leafy = self._leaves(w, batch, change is not None)
        directions = [v] if change is None else [v, change]
        with torch.enable_grad():
            loss = _differentiable(self.forward(leaves[0], leafy).sum())
            gradient = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
            # a loss that is linear in a leaf has a gradient that does not depend on it
            used = [i for i, g in enumerate(gradient) if g.requires_grad]
            if not used:
                return torch.zeros_like(w), None if change is None else torch.zeros_like(change)
            products = torch.autograd.grad(
                [gradient[i] for i in used],
                leaves,
                [directions[i] for i in used],
                materialize_grads=True,
            )
        return products[0], None if change is None else products[1]

    def operations(self, w: Tensor, batch: AnyBatch) -> set[str]:
        """The names of the nodes in autograd's graph of f."""
        with torch.enable_grad():
            stack = [self.forward(w.detach().requires_grad_(), batch).grad_fn]
        nodes = set()
        while stack:
            node = stack.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                stack.extend(before for before, _ in node.next_functions)
        return {type(node).__name__ for node in nodes}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of outputs that :meth:`predict` gave, a scalar tensor."""
        loss = self._loss_function(outputs, cast_like(targets, self._like))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"the loss returned {given}: it must return one number as a tensor")
        return loss.reshape(())

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

    def _flat(self, inputs: Inputs) -> Tensor:
        """The inputs of a perceptron, (agents, samples, features)."""
        assert isinstance(inputs, Tensor)
        return cast_like(inputs, self._like).flatten(2)

    def _leaves(self, w: Tensor, batch: Batch, by_inputs: bool) -> tuple[list[Tensor], Batch]:
        """The leaves of a stack in autograd's graph, and the batch that holds them."""
        leaves = [w.detach().requires_grad_()]
        if by_inputs:
            assert isinstance(batch.inputs, Tensor)
            leaves.append(batch.inputs.detach().requires_grad_())
            batch = batch._replace(inputs=leaves[1])
        return leaves, batch


def _joined(tensors: tuple[Tensor, ...]) -> Tensor:
    """The concatenation; each tensor is freed once copied, so that memory holds one copy."""
    waiting = deque(tensors)
    del tensors
    vector = waiting[0].new_empty(sum(tensor.numel() for tensor in waiting))
    start = 0
    while waiting:
        part = waiting.popleft().reshape(-1)
        vector[start : start + len(part)] = part
        start += len(part)
    return vector


def _differentiable(loss: Tensor) -> Tensor:
    if not loss.requires_grad:
        raise InputError(
            "the loss does not depend on the parameters in a way that can be differentiated: "
            "the module or the loss may detach, use no_grad, or leave torch"
        )
    return loss
