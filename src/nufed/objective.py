"""An ``nn.Module`` and a loss, seen as functions of one flat parameter vector."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from nufed.errors import InputError, require
from nufed.modules import (
    cast_like,
    check_parameters,
    check_tensors,
    layers_with_running_stats,
    seeded,
)
from nufed.perceptron import perceptron
from nufed.stacked import stacked_losses, stacked_outputs

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Batch(NamedTuple):
    """Samples, and the seed of their dropout masks.

    ``inputs`` is a tensor, a tuple of tensors (``module(*inputs)``) or a mapping
    (``module(**inputs)``). With a ``seed`` the module runs in training mode and its random layers
    draw from that seed: the same batch always meets the same masks. Without one it runs in
    evaluation mode: no seed, no noise.
    """

    inputs: Inputs
    targets: Tensor
    seed: int | None = None


AnyBatch: TypeAlias = Batch | tuple[Inputs, Tensor]


class AnyObjective(Protocol):
    """What fine-tuning, meta-gradients and algorithms need of an objective."""

    @property
    def base(self) -> Objective:
        """The objective on the module's own parameters."""
        ...

    @property
    def double(self) -> AnyObjective:
        """The same in float64."""
        ...

    def grad(self, w: Tensor, batch: AnyBatch) -> Tensor:
        """∇f(w, batch)."""
        ...

    def hvp(self, w: Tensor, batch: AnyBatch, v: Tensor) -> Tensor:
        """∇²f(w, batch)·v."""
        ...

    def beside(
        self, w: Tensor, batch: AnyBatch, v: Tensor, step: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """∇f(w+δv) and ∇f(w−δv) with δ = ``step``."""
        ...

    def norm(self, w: Tensor) -> Tensor:
        """‖w‖, shaped so that it multiplies w; for steps, a bound will do."""
        ...


class Objective:
    """The loss of a module on a batch, as a function f(w, batch) of its flat parameters w.

    The vector holds every trainable parameter once (tied weights are one parameter, frozen ones
    are left out), in the order of ``module.named_parameters()``. All methods are pure: they change
    neither w nor the module, of which the objective keeps its own copy.

    All of them also take a stack of vectors, one row per agent, with batches stacked the same way,
    and then give one result per row (:mod:`nufed.stacked`).

    Args:
        module: any ``nn.Module`` with trainable floating-point parameters of one dtype.
        loss: ``loss(outputs, targets) -> scalar``; cross-entropy by default.
        running_stats: what to do about layers that keep running statistics (BatchNorm).
            ``"refuse"`` raises; ``"frozen"`` always uses the statistics stored in the module and
            never changes them.

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
        running_stats: Literal["refuse", "frozen"] = "refuse",
    ) -> None:
        require(
            running_stats in ("refuse", "frozen"),
            "running_stats",
            running_stats,
            'must be "refuse" or "frozen"',
        )
        check_tensors(module)
        self._keepers = layers_with_running_stats(module)
        if self._keepers and running_stats == "refuse":
            raise InputError(
                f"the module has layers with running statistics ({', '.join(self._keepers)}), "
                "which averaging over agents would silently corrupt; use nn.GroupNorm, or pass "
                'running_stats="frozen" to keep the stored statistics fixed'
            )
        self._module = copy.deepcopy(module)
        self._loss_function = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
        self._running_stats = running_stats
        parameters = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
        check_parameters(module, list(parameters.values()))
        # every name of every parameter (tied weights have several) and its place in the vector
        places = {id(p): i for i, p in enumerate(parameters.values())}
        every = self._module.named_parameters(remove_duplicate=False)
        self._names = {n: places[id(p)] for n, p in every if id(p) in places}
        self._shapes = [p.shape for p in parameters.values()]
        self._sizes = [p.numel() for p in parameters.values()]
        self._initial = torch.cat([p.detach().reshape(-1) for p in parameters.values()])
        for parameter, view in zip(parameters.values(), self._views(self._initial), strict=True):
            parameter.data = view  # the module's parameters take no memory of their own
        self._like = self._initial[:0]
        self._has_buffers = any(True for _ in self._module.buffers())
        # layers that never go into training mode: keepers of statistics, and those the user froze
        chosen = [n for n, m in module.named_modules() if module.training and not m.training]
        self._always_evaluated = [*self._keepers, *chosen]
        self._chain = perceptron(self._module, self._loss_function)
        self._set_training(False)

    @property
    def size(self) -> int:
        """How many numbers the flat vector holds."""
        return self._initial.numel()

    @property
    def sizes(self) -> list[int]:
        """How many of them each parameter tensor holds, in the order of the vector."""
        return list(self._sizes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the flat vector."""
        return self._like.dtype

    @cached_property
    def double(self) -> Objective:
        """The same objective in float64 (it casts the batches it is given).

        It takes no memory for parameters: every call passes them to its module.
        """
        double = copy.copy(self)
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

    @property
    def base(self) -> Objective:
        """Itself: this is the objective on the module's own parameters."""
        return self

    def norm(self, w: Tensor) -> Tensor:
        """‖w‖; of a stack, one per row."""
        norm: Tensor = torch.linalg.vector_norm(w, dim=-1, keepdim=w.ndim > 1)
        return norm

    def initial(self) -> Tensor:
        """A copy of the module's parameters as one flat vector."""
        return self._initial.to(self.dtype, copy=True)

    def value(self, w: Tensor, batch: AnyBatch) -> Tensor:
        """f(w, batch), a scalar tensor (of a stack: one number per row)."""
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
            # fused attention has no second derivative; the operations it is made of have
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
        # the change is computed twice, so that it need not be kept
        ahead = self.grad(w.to(self.dtype) + v.to(self.dtype) * step, batch)
        behind = self.grad(w.to(self.dtype) - v.to(self.dtype) * step, batch)
        return ahead, behind

    def stacked_grad(
        self, w: Tensor, batch: AnyBatch, by_inputs: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of a stack, and on request the derivatives by the inputs (one tensor)."""
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
        """The Hessian-vector products of a stack; with a change of the inputs, by both together."""
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

    def predict(self, w: Tensor, inputs: Inputs) -> Tensor:
        """The module's outputs for ``inputs`` in evaluation mode."""
        self._check_vector(w)
        with torch.no_grad(), self._mode(seed=None):
            return self._outputs(self._views(w), inputs, w.ndim > 1)

    def operations(self, w: Tensor, batch: AnyBatch) -> set[str]:
        """The names of the differentiable operations that f is made of, as autograd calls them."""
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

    def module(self, w: Tensor) -> nn.Module:
        """A copy of the module that holds the parameters w, in evaluation mode."""
        self._check_vector(w)
        module = copy.deepcopy(self._module).eval()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, value in self._unflatten(w).items():
                parameters[name].copy_(value)
        return module

    def forward(self, w: Tensor, batch: AnyBatch) -> Tensor:
        """f(w, batch) as :meth:`value` gives it, in autograd's graph."""
        self._check_vector(w)
        return self._forward(self._views(w), batch, stacked=w.ndim > 1)

    def _forward(self, views: Sequence[Tensor], batch: AnyBatch, stacked: bool) -> Tensor:
        """f of the parameters that are given one by one."""
        batch = Batch(*batch)
        with self._mode(batch.seed):
            outputs = self._outputs(views, batch.inputs, stacked)
            if not stacked:
                return self.loss(outputs, batch.targets)
            targets = cast_like(batch.targets, self._like)
            return stacked_losses(self._loss_function, outputs, targets)

    def _outputs(self, views: Sequence[Tensor], inputs: Inputs, stacked: bool) -> Tensor:
        parameters = {name: views[place] for name, place in self._names.items()}
        arguments: tuple[Tensor, ...] = ()
        keywords: dict[str, Tensor] = {}
        if isinstance(inputs, Mapping):
            keywords = {name: cast_like(x, self._like) for name, x in inputs.items()}
        elif isinstance(inputs, Tensor):
            arguments = (cast_like(inputs, self._like),)
        else:
            arguments = tuple(cast_like(x, self._like) for x in inputs)
        if stacked:
            return stacked_outputs(self._module, parameters, arguments, keywords)
        outputs: Tensor = functional_call(
            self._module, parameters, arguments, keywords, tie_weights=False
        )
        return outputs

    def _flat(self, inputs: Inputs) -> Tensor:
        """The inputs of a chain, (agents, samples, numbers)."""
        assert isinstance(inputs, Tensor)
        return cast_like(inputs, self._like).flatten(2)

    def _leaves(self, w: Tensor, batch: Batch, by_inputs: bool) -> tuple[list[Tensor], Batch]:
        """What a stack is differentiated by, and the batch of which it is a part."""
        leaves = [w.detach().requires_grad_()]
        if by_inputs:
            assert isinstance(batch.inputs, Tensor)
            leaves.append(batch.inputs.detach().requires_grad_())
            batch = batch._replace(inputs=leaves[1])
        return leaves, batch

    def _unflatten(self, w: Tensor) -> dict[str, Tensor]:
        views = self._views(w)
        return {name: views[place] for name, place in self._names.items()}

    def _views(self, w: Tensor) -> list[Tensor]:
        """The parameters that w (or every row of a stack) holds, as views."""
        # split, not slicing: its backward pass is one concatenation
        parts = torch.split(w, self._sizes, dim=-1)
        shapes = [(*w.shape[:-1], *shape) for shape in self._shapes]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _check_vector(self, w: Tensor) -> None:
        if w.ndim not in (1, 2) or w.shape[-1] != self.size or w.dtype != self.dtype:
            raise InputError(
                f"w has shape {tuple(w.shape)} and dtype {w.dtype}: this objective takes a flat "
                f"vector of {self.size} numbers of dtype {self.dtype}, as initial() gives"
            )

    @contextmanager
    def _mode(self, seed: int | None) -> Iterator[None]:
        """Evaluation mode without a seed; with one, training mode and randomness from it."""
        if self._module.training != (seed is not None):
            self._set_training(seed is not None)
        before = dict(self._module.named_buffers()) if self._has_buffers else {}
        before = {name: buffer.clone() for name, buffer in before.items()}
        with nullcontext() if seed is None else seeded(seed, self._like.device):
            yield
        if self._has_buffers:
            self._check_buffers(before)

    def _set_training(self, training: bool) -> None:
        self._module.train(training)
        for name in self._always_evaluated:
            self._module.get_submodule(name).training = False

    def _check_buffers(self, before: dict[str, Tensor]) -> None:
        for name, buffer in self._module.named_buffers():
            old = before.get(name)
            same = old is not None and torch.allclose(buffer, old, rtol=0, atol=0, equal_nan=True)
            if not same:
                raise InputError(
                    f"the module's forward changes its buffer {name!r}, and such state cannot be "
                    "part of a meta-gradient; remove the layer that keeps it, or put that layer "
                    "into evaluation mode before giving the module to nufed"
                )


def _joined(tensors: tuple[Tensor, ...]) -> Tensor:
    """One vector of all; each is dropped when it is copied, so that memory holds one copy."""
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
