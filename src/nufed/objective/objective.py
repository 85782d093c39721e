"""An ``nn.Module`` and a loss as functions of one flat parameter vector."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn

from nufed.errors import require
from nufed.objective.batch import AnyBatch, Batch, Inputs, Loss
from nufed.objective.exits import FirstExits, narrow_module
from nufed.objective.flat_loss import PLAIN_LOSSES, differentiable
from nufed.objective.layered_net import layered_plan
from nufed.objective.local_steps import LocalSteps
from nufed.objective.modules import MovedStatistics, cast_like
from nufed.objective.parts import Part
from nufed.objective.perceptron import perceptron


class Objective(LocalSteps):
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

    >>> objective = Objective(nn.Linear(2, 1, bias=False), nn.functional.mse_loss)
    >>> w = torch.tensor([1.0, 2.0])
    >>> batch = (torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0]]))
    >>> objective.value(w, batch), objective.grad(w, batch)
    (tensor(9.), tensor([6., 6.]))
    >>> objective.hvp(w, batch, torch.tensor([1.0, 0.0]))
    tensor([2., 2.])
    """

    @cached_property
    def double(self) -> Objective:
        """The same objective in float64; it casts its batches.

        It stores no parameters: every call passes them to its module.
        """
        double = copy.copy(self)
        double._exits, double._narrow, double._moved = {}, {}, MovedStatistics()
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
        other._loss_function, other._plain_loss = loss, loss in PLAIN_LOSSES
        other._chain = perceptron(other._module, loss)
        return other

    def with_shift(self, shift: Tensor) -> Objective:
        """The same with ``shift`` added to the outputs before the loss."""
        other = self.with_loss(lambda outputs, y: self.loss(outputs + shift.to(outputs.device), y))
        other._chain = self._chain and replace(self._chain, shift=shift.to(self._like.device))
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
        other._module, other._parts, other._tensors = self._exits[depth], {}, {}
        other._moved = MovedStatistics()
        other._names = {f"module.{name}": place for name, place in self._names.items()}
        other._statistics = {f"module.{name}": i for name, i in self._statistics.items()}
        other._always_evaluated = [f"module.{name}" for name in self._always_evaluated]
        other._chain = None
        other._plan = layered_plan(other._module, other._names, other._always_evaluated)
        other._set_training(False)
        return other

    def level(
        self, widths: Sequence[Fraction], depths: Sequence[int], level: int, loss: Loss
    ) -> tuple[Objective, Part]:
        """The objective of a capacity level's sub-network, and its part of the vector.

        Its own vector holds the numbers of that part. The loss is one of the outputs of its exits,
        and draws random numbers only if this objective's own does.
        """
        key = tuple(widths), tuple(depths), level
        if key not in self._narrow:
            module = narrow_module(self._module, widths[level], depths[level]).train()
            layers = dict(module.named_modules())
            for name in {f"module.{name}" for name in self._always_evaluated} & layers.keys():
                layers[name].training = False
            own = Objective(module, self._loss_function, running_stats=self._running_stats)
            own._facts()  # known to all copies
            whole = self._unflatten(self._initial)
            for name, i in own._names.items():  # each is the first rows and columns of the whole's
                view = whole[name.removeprefix("module.")][tuple(map(slice, own._shapes[i]))]
                own._inside[name] = view.shape, view.stride(), int(view.storage_offset())
            self._narrow[key] = own, Part.where(self.first_levels(widths, depths) <= level)
        own, part = self._narrow[key]
        if own._loss_function != loss:
            own = own.with_loss(loss)
            own._plain_loss = self._plain_loss
            self._narrow[key] = own, part
        return own, part

    def tensors_inside(self, w: Tensor) -> dict[str, Tensor]:
        """Of a capacity level: its tensors by name, as views of the whole network's vector."""
        start = w.storage_offset()
        return {n: w.as_strided(shape, at, start + i) for n, (shape, at, i) in self._inside.items()}

    @property
    def base(self) -> Objective:
        """Itself: this is the objective on the module's own parameters."""
        return self

    def norm(self, w: Tensor) -> Tensor:
        """‖w‖, of whole vectors without tracked statistics; for a stack, one per row."""
        own = w[..., : self.counted()] if w.shape[-1] == self.size else w
        norm: Tensor = torch.linalg.vector_norm(own, dim=-1, keepdim=w.ndim > 1)
        return norm

    def grad(self, w: Tensor, batch: AnyBatch, part: Part | None = None) -> Tensor:
        """∇f(w, batch), or the numbers of it in a part, which saves the work for the others."""
        if w.ndim == 1:
            return self.single_grad(w, batch, part)
        gradient, _ = self.stacked_grad(w, batch)
        return gradient if part is None else part.take(gradient)

    def hvp(self, w: Tensor, batch: AnyBatch, v: Tensor, part: Part | None = None) -> Tensor:
        """∇²f(w, batch)·v, by differentiating ⟨∇f, v⟩; the Hessian is never formed.

        With a part v is taken as 0 outside it, which saves the work for those coordinates.
        """
        require(v.shape == w.shape, "v", tuple(v.shape), f"must have the shape of w, {w.shape}")
        if w.ndim == 1:
            return self.single_hvp(w, batch, v, part)
        return self.stacked_hvp(w, batch, v if part is None else part.only(v))[0]

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
            loss = differentiable(self.forward(leaves[0], leafy).sum())
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
            loss = differentiable(self.forward(leaves[0], leafy).sum())
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
