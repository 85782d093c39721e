"""An ``nn.Module`` and a loss as functions of one flat parameter vector."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, compress
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.nn.attention import SDPBackend, sdpa_kernel

from nufed.errors import InputError, require
from nufed.objective.batch import AnyBatch, Batch, Inputs, Loss
from nufed.objective.fast.perceptron import faster
from nufed.objective.fast.stack import stacked_losses, stacked_outputs
from nufed.objective.frozen import InDouble, doubled
from nufed.objective.micro_batches import MicroBatches
from nufed.objective.modules import (
    MemoryFormat,
    ModuleFacts,
    MovedStatistics,
    Precision,
    RunningStats,
    along,
    batch_counters,
    call_arguments,
    cast_like,
    channels_last,
    check_parameters,
    check_tensors,
    copied,
    holding,
    known_zero,
    layers_with_running_stats,
    logits_of,
    norm_layers,
    tracked_statistics,
    watched,
)
from nufed.objective.parts import Part, find_part

PLAIN_LOSSES: tuple[object, ...] = (
    F.cross_entropy,
    F.mse_loss,
    F.nll_loss,
    F.l1_loss,
    F.huber_loss,
)
"""Losses that draw no random numbers."""
FEW = 2**20  # numbers of which a second copy does not matter


def _check_options(
    running_stats: RunningStats, precision: Precision, memory_format: MemoryFormat, micro_batch: int
) -> None:
    """Raise an :class:`~nufed.errors.InputError` for the first option that is not allowed."""
    for name, value, choices in (
        ("running_stats", running_stats, get_args(RunningStats)),
        ("precision", precision, get_args(Precision)),
        ("memory_format", memory_format, get_args(MemoryFormat)),
    ):
        require(value in choices, name, value, f"must be one of {', '.join(choices)}")
    require(micro_batch >= 0, "micro_batch", micro_batch, "must be 0 or more samples")
    require(
        not micro_batch or running_stats != "tracked",
        "micro_batch",
        micro_batch,
        'can\'t be combined with running_stats = "tracked", which normalises by whole batches',
    )


class Objective:
    """The loss of a module on a batch, as a function f(w, batch) of its flat parameters w.

    The vector holds every trainable parameter once (tied weights are one parameter, frozen ones
    are excluded), in the order of ``module.named_parameters()``. All methods are pure: they change
    neither w nor the module, of which the objective keeps its own copy. Frozen parameters are not
    copied: all objectives of a module share them, and nothing may change them.

    All of them also take a stack of vectors, one row per agent, with batches stacked the same way,
    and then give one result per row (:mod:`nufed.objective.fast.stack`).

    Args:
        module: any ``nn.Module`` with trainable floating-point parameters of one dtype.
        loss: ``loss(outputs, targets) -> scalar``; cross-entropy by default.
        running_stats: how to treat layers with running statistics (BatchNorm).
            ``"refuse"`` raises; ``"frozen"`` always uses the statistics stored in the module and
            never changes them; ``"tracked"`` makes them coordinates of the flat vector, after the
            parameters: training normalises by the batch and updates them (:meth:`track`), and the
            algorithm decides whether they are averaged (as by FedAvg) or private (FedBN).
        precision: ``"bfloat16"`` computes the module by autocast, where its dtype is float32.
            Vectors, outputs, the loss and sums stay in float32. Finite differences of gradients
            drown in its rounding: use exact or first-order curvature.
        memory_format: ``"channels_last"`` lays out images and kernels of convolutions so, which
            their gradients are often faster in, with the same results to rounding. Hessian-vector
            products, which are slower in it, stay in the usual layout; stacks are refused.
        micro_batch: samples that are computed at a time, so that activations of large models fit:
            derivatives are sums over them, equal to those of the whole batch up to rounding (with
            dropout: up to its masks). The loss must be a mean over samples or targets. 0: all.

    >>> objective = Objective(nn.Linear(2, 1, bias=False), nn.functional.mse_loss)
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
        precision: Precision = "float32",
        memory_format: MemoryFormat = "contiguous",
        micro_batch: int = 0,
    ) -> None:
        _check_options(running_stats, precision, memory_format, micro_batch)
        self._micro = MicroBatches(micro_batch)
        check_tensors(module)
        self._keepers = layers_with_running_stats(module)
        if self._keepers and running_stats == "refuse":
            raise InputError(
                f"the module has layers with running statistics ({', '.join(self._keepers)}), "
                "which averaging over agents would silently corrupt; use nn.GroupNorm, or pass "
                'running_stats="frozen" to keep the stored statistics fixed, or "tracked" to '
                "train and send them with the parameters"
            )
        self._module = copied(module)
        self._running_stats = running_stats
        self._precision, self._memory_format = precision, memory_format
        parameters = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
        check_parameters(module, list(parameters.values()))
        # every name of every parameter (tied weights have several) and its index
        places = {id(p): i for i, p in enumerate(parameters.values())}
        every = self._module.named_parameters(remove_duplicate=False)
        self._names = {n: places[id(p)] for n, p in every if id(p) in places}
        statistics = tracked_statistics(self._module) if running_stats == "tracked" else {}
        self._statistics = {n: len(parameters) + i for i, n in enumerate(statistics)}
        self._names |= self._statistics
        values = [*parameters.values(), *statistics.values()]
        self._shapes = [p.shape for p in values]
        self._sizes = [p.numel() for p in values]
        self._initial = torch.cat([p.detach().reshape(-1) for p in values])
        # tensors of the same shapes that take no memory, for views of a vector
        self._shaped = [self._initial[:0].new_empty(()).expand(shape) for shape in self._shapes]
        for parameter, view in zip(parameters.values(), self._views(self._initial), strict=False):
            parameter.data = view  # the module's parameters take no memory of their own
        self._like = self._initial[:0]
        self._parts: dict[str, Part] = {}
        self._tensors: dict[str, list[int]] = {}
        # buffers of the module itself; tracked statistics are passed to it in every call
        buffers = {name for name, _ in self._module.named_buffers()}
        passed = {*statistics, *batch_counters(self._module)} if statistics else set()
        self._has_buffers = bool(buffers - passed)
        self._last_statistics: list[Tensor] = []
        self._moved = MovedStatistics()
        self._known: ModuleFacts | None = None
        # layers that stay in evaluation mode: those with statistics, and those the user froze
        chosen = [n for n, m in module.named_modules() if module.training and not m.training]
        self._always_evaluated = chosen if self._statistics else [*self._keepers, *chosen]
        self._set_training(False)
        self._loss_function = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
        mixed = precision == "bfloat16"
        allowed = "mixed precision needs a module in float32"
        require(not mixed or self.dtype == torch.float32, "precision", precision, allowed)
        self._in_double: InDouble | None = None
        self._fast = None if mixed else faster(self._module, self._loss_function)
        self._closed = False  # whether it serves vectors, too, not only stacks
        self._shift: Tensor | None = None  # of the outputs in the loss

    @property
    def size(self) -> int:
        """The length of the flat vector."""
        return self._initial.numel()

    @property
    def sizes(self) -> list[int]:
        """The numbers of elements of its parameter tensors, in order."""
        return list(self._sizes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the flat vector."""
        return self._like.dtype

    @property
    def names(self) -> list[str]:
        """The names of all tensors of the flat vector; tied ones have several."""
        return list(self._names)

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers with parameters, in order; the last is the head.

        The name of the module itself is empty. Types are valid, parameter values are not.
        """
        names = (name for name in self._names if name not in self._statistics)
        layers = dict.fromkeys(name.rpartition(".")[0] for name in names)
        return {name: self._module.get_submodule(name) for name in layers}

    @property
    def tracks_statistics(self) -> bool:
        """Whether running statistics are coordinates of the flat vector."""
        return bool(self._statistics)

    def counted(self, part: Part | None = None) -> int:
        """How many coordinates of a vector, or of a part of it, are parameters: the first ones.

        Tracked statistics follow them. Batches move these and not gradients, so no norm, clipping,
        proximal term, aggregation rule or codec counts them; all of these ask here.
        """
        number = self.size - sum(self._sizes[i] for i in self._statistics.values())
        return number if part is None else part.below(number)

    def part(self, name: str, rest: bool = False) -> Part:
        """A named part of the model, or the rest of it, as an index set of the flat vector.

        ``"head"`` is the last layer with parameters, ``"body"`` the rest, ``"norm"`` all
        normalisation layers, ``"last:2"`` the last two layers with parameters, ``"all"`` everything
        and ``"none"`` nothing; any other name is a pattern of parameter names, such as
        ``"layers.0.*"``. Several may be given, separated by commas; the part is their union.
        Tracked statistics belong to their layers.

        >>> from nufed import Objective
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> objective = Objective(net)
        >>> objective.part("head"), objective.part("0.bias").size
        (Part(name='head', index=slice(8, 11, None), size=3), 2)
        >>> objective.part("*.bias", rest=True).size
        8
        """
        if rest:
            others = f"all but {name}"
            if others not in self._parts:
                self._parts[others] = self.part(name).rest(self.size)
            return self._parts[others]
        if name not in self._parts:
            ends = list(accumulate(self._sizes, initial=0))
            places = {n: slice(ends[i], ends[i + 1]) for n, i in self._names.items()}
            self._parts[name] = find_part(
                name, places, list(self.layers), norm_layers(self._module)
            )
        return self._parts[name]

    def initial(self) -> Tensor:
        """A copy of the module's parameters as one flat vector."""
        return self._initial.to(self.dtype, copy=True)

    def module(self, w: Tensor, training: bool = False) -> nn.Module:
        """A copy of the module that holds the parameters w, in evaluation mode.

        With ``training`` in training mode, except for layers that are always evaluated. Frozen
        parameters share the memory of this objective's.
        """
        self._check_vector(w)
        module = copied(self._module).train(training)
        for name in self._always_evaluated:
            module.get_submodule(name).training = False
        parameters: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        parameters |= dict(module.named_buffers())
        with torch.no_grad():
            for name, value in self._unflatten(w).items():
                parameters[name].copy_(value)
        return module

    # outputs, loss and derivatives

    def predict(self, w: Tensor, inputs: Inputs) -> Tensor:
        """The module's outputs for ``inputs`` in evaluation mode."""
        self._check_vector(w)
        with torch.no_grad(), self._mode(seed=None):
            if w.ndim > 1 or not self._micro.size:
                return self._outputs(self._views(w), inputs, w.ndim > 1)
            views, parts = self._views(w), self._micro.inputs(inputs)
            return torch.cat([self._outputs(views, part, stacked=False) for part in parts])

    def layer_inputs(
        self, w: Tensor, inputs: Inputs, layers: Sequence[str]
    ) -> dict[str, list[Tensor]]:
        """The inputs of these layers for ``inputs`` in evaluation mode, one tensor per call.

        Not defined for a stack.

        >>> from nufed import Objective
        >>> objective = Objective(nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
        >>> x = torch.tensor([[1.0, -1.0]])
        >>> objective.layer_inputs(objective.initial(), x, ["1"])
        {'1': [tensor([[1., 0.]])]}
        """
        seen: dict[str, list[Tensor]] = {name: [] for name in layers}
        hooks = [
            self._module.get_submodule(name).register_forward_pre_hook(
                lambda _, arguments, calls=calls: calls.extend(arguments[:1])
            )
            for name, calls in seen.items()
        ]
        try:
            self.predict(w, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return seen

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
        stacked, views = w.ndim > 1, self._views(w)
        return self._summed(w, batch, lambda part: self._forward(views, part, stacked))

    def grad(self, w: Tensor, batch: AnyBatch, part: Part | None = None) -> Tensor:
        """∇f(w, batch), or the numbers of it in a part, which saves the work for the others."""
        self._check_vector(w)
        wanted = self._touched(part)
        if w.ndim > 1 or self._closed_form:
            gradient, _ = self.joint.grad(w, batch, wanted=wanted)
            return gradient if part is None else part.take(gradient)
        if not wanted:
            return w.new_empty(0)
        gradient = self._summed(w, batch, lambda part: self._grad(w, part, wanted))
        if part is None or part.size == len(gradient):
            return gradient
        whole = torch.zeros_like(w)
        pieces = torch.split(gradient, [self._sizes[i] for i in wanted])
        for i, piece in zip(wanted, pieces, strict=True):
            torch.split(whole, self._sizes)[i].copy_(piece)
        return part.take(whole)

    def hvp(self, w: Tensor, batch: AnyBatch, v: Tensor, part: Part | None = None) -> Tensor:
        """∇²f(w, batch)·v, by differentiating ⟨∇f, v⟩; the Hessian is never formed.

        With a part v is taken as 0 outside it, which saves the work for those coordinates.
        """
        require(v.shape == w.shape, "v", tuple(v.shape), f"must have the shape of w, {w.shape}")
        if w.ndim > 1 or self._closed_form:
            v = v if part is None else part.only(v)
            return self.joint.hvp(w, batch, v, wanted=self._touched(part))[0]

        def product() -> Tensor:
            return self._summed(w, batch, lambda some: self._hvp(w, some, v, part))

        try:
            return product()
        except RuntimeError as error:
            # fused attention has no second derivative; its unfused form has one
            with sdpa_kernel(SDPBackend.MATH), suppress(RuntimeError):
                return product()
            raise error

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

    def norm(self, w: Tensor) -> Tensor:
        """‖w‖, of whole vectors without tracked statistics; for a stack, one per row."""
        counted = w[..., : self.counted()] if w.shape[-1] == self.size else w
        norm: Tensor = torch.linalg.vector_norm(counted, dim=-1, keepdim=w.ndim > 1)
        return norm

    def track(
        self, w: Tensor, batch: AnyBatch, at: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        """w with running statistics updated by a training batch; w itself if it tracks none.

        As in torch: r ← (1 − momentum)·r + momentum·(the batch's statistic), with the parameters
        and statistics r of ``at``, the vector before the step that led to w (w itself by default).
        The statistics in w are ignored. With ``overwrite`` they are written into w itself.
        """
        batch = Batch(*batch)
        if not self._statistics:
            return w
        at = w if at is None else at
        statistics = self._moved.of(at, batch)
        if statistics is None:
            views = [view.clone() for view in self._views(at)]
            if batch.seed is not None:
                with torch.no_grad(), self._mode(batch.seed):
                    self._outputs(views, batch.inputs, stacked=False, moving=True)
            statistics = views[-len(self._statistics) :]
        moved = w if overwrite else w.clone()
        for view, statistic in zip(self._views(moved)[-len(statistics) :], statistics, strict=True):
            view.copy_(statistic)
        return moved

    # variants

    @property
    def base(self) -> Objective:
        """Itself: this is the objective on the module's own parameters."""
        return self

    @cached_property
    def double(self) -> Objective:
        """The same objective in float64; it casts its batches.

        It stores no parameters: every call passes them to its module, and frozen ones are shared
        (:mod:`nufed.objective.frozen`).
        """
        double = copy.copy(self)
        double._moved = MovedStatistics()
        double._like, double._precision = self._like.double(), "float32"
        zero = double._like.new_zeros(())
        stand_ins = {
            id(p): nn.Parameter(zero.expand(p.shape))
            for n, p in self._module.named_parameters()
            if n in self._names
        }
        double._module = doubled(self._module, stand_ins)
        double._in_double = InDouble(double._module)
        if isinstance(self._loss_function, nn.Module):
            double._loss_function = copy.deepcopy(self._loss_function).double()
        double._fast = faster(double._module, double._loss_function)
        return double if self._shift is None else double.variant(shift=self._shift.double())

    def variant(
        self,
        *,
        module: nn.Module | None = None,
        loss: Loss | None = None,
        memory_format: MemoryFormat | None = None,
        precision: Precision | None = None,
        shift: Tensor | None = None,
    ) -> Objective:
        """The objective of another module, with another loss, memory format or precision.

        With a ``shift``, which is added to the outputs in derivatives, it has the same loss.
        """
        if shift is not None:
            shifted = copy.copy(self)
            shifted.__dict__.pop("double", None)
            shifted._shift, fast = shift, self._fast
            shifted._fast = None if fast is None else replace(fast, shift=shift)
            return shifted
        loss = self._loss_function if loss is None else loss
        memory_format = memory_format or self._memory_format
        precision = precision or self._precision
        if module is not None:
            return Objective(
                module,
                loss,
                running_stats=self._running_stats,
                precision=precision,
                memory_format=memory_format,
                micro_batch=self._micro.size,
            )
        other = copy.copy(self)
        other.__dict__.pop("double", None)
        other._micro = MicroBatches(self._micro.size)
        other._loss_function, other._memory_format = loss, memory_format
        other._precision = precision
        other._fast = None if precision == "bfloat16" else faster(self._module, loss)
        return other

    @property
    def joint(self) -> JointDerivatives:
        """Derivatives of stacks by the parameters and by the inputs at once."""
        return JointDerivatives(self)

    # how it is computed

    @property
    def _closed_form(self) -> bool:
        """Whether derivatives by one vector are written out, too, as in a stack."""
        return self._closed and self._fast is not None and not self._micro.size

    def _summed(self, w: Tensor, batch: AnyBatch, compute: Callable[[Batch], Tensor]) -> Tensor:
        """What is computed of a batch, as a weighted sum over its micro-batches."""
        batch = Batch(*batch)
        if not self._micro.size:
            return compute(batch)
        parts = self._micro.parts(batch, stacked=w.ndim > 1)
        if len(parts) > 1 and not self._micro.checked:
            self._micro.check(self.predict(w, batch.inputs), batch.targets, self.loss)
        (share, first), *others = parts
        total = compute(first) if not others else share * compute(first)
        for share, part in others:
            total = total + share * compute(part)
        return total

    def _forward(
        self, views: Sequence[Tensor], batch: AnyBatch, stacked: bool, twice: bool = False
    ) -> Tensor:
        """f of the parameter tensors; ``twice``: it will be differentiated twice."""
        batch = Batch(*batch)
        with self._mode(batch.seed):
            outputs = self._outputs(views, batch.inputs, stacked, twice=twice)
            if self._shift is not None:
                outputs = outputs + self._shift
            if not stacked:
                return self.loss(outputs, batch.targets)
            targets = cast_like(batch.targets, self._like)
            return stacked_losses(self._loss_function, outputs, targets)

    def _outputs(
        self,
        views: Sequence[Tensor],
        inputs: Inputs,
        stacked: bool,
        *,
        moving: bool = False,
        twice: bool = False,
    ) -> Tensor:
        facts = self._facts()
        parameters = {name: views[place] for name, place in self._names.items()}
        if self._statistics:  # no gradient flows into them, and layers update them in place
            copies = {} if moving else {n: parameters[n].detach().clone() for n in self._statistics}
            self._last_statistics = list(copies.values())
            parameters |= copies | facts.counters
        arguments, keywords = call_arguments(inputs, self._like)
        if self._memory_format == "channels_last" and not twice:
            if stacked:
                raise InputError('a stack of vectors can\'t have memory_format = "channels_last"')
            parameters = {name: channels_last(tensor) for name, tensor in parameters.items()}
            arguments = tuple(map(channels_last, arguments))
            keywords = {name: channels_last(tensor) for name, tensor in keywords.items()}
        with self._casting():
            outputs = self._called(facts, parameters, arguments, keywords, stacked)
        return cast_like(outputs, self._like) if self._precision == "bfloat16" else outputs

    @contextmanager
    def _held(self, views: Sequence[Tensor]) -> Iterator[None]:
        """The parameters for layers that a backward pass calls again (gradient checkpointing)."""
        parameters = {name: views[place] for name, place in self._names.items()}
        with holding(self._facts().slots, parameters):
            yield

    def _casting(self) -> AbstractContextManager[Any]:
        """The context in which the module is called."""
        if self._precision == "bfloat16":
            return torch.autocast(self._like.device.type, torch.bfloat16)
        wide = self._in_double
        return wide if wide is not None and wide.parameters else nullcontext()

    def _called(
        self,
        facts: ModuleFacts,
        parameters: dict[str, Tensor],
        arguments: tuple[Tensor, ...],
        keywords: dict[str, Tensor],
        stacked: bool,
    ) -> Tensor:
        """The outputs of the module with these parameters."""
        if stacked:
            return stacked_outputs(self._module, parameters, arguments, keywords)
        with holding(facts.slots, parameters):
            return logits_of(self._module(*arguments, **keywords))

    def _grad(self, w: Tensor, batch: Batch, wanted: Sequence[int]) -> Tensor:
        """The gradient by these tensors, one after another."""
        views = self._views(w.detach())
        leaves = [views[i].requires_grad_() for i in wanted]
        with torch.enable_grad():
            loss = self._forward(views, batch, stacked=False)
        if self._statistics:
            self._moved.keep(self._last_statistics, w, batch)
        with self._held(views):
            return _joined(self._by(leaves, loss))

    def _by(self, leaves: list[Tensor], loss: Tensor) -> tuple[Tensor, ...]:
        """The gradients of a loss by some tensors of the vector."""
        if len(leaves) >= len(self._sizes) - len(self._statistics):
            differentiable(loss)
        elif not loss.requires_grad:
            return tuple(torch.zeros_like(leaf) for leaf in leaves)
        return torch.autograd.grad(loss, leaves, materialize_grads=True)

    def _hvp(self, w: Tensor, batch: AnyBatch, v: Tensor, part: Part | None) -> Tensor:
        self._check_vector(w)
        # tensors in which v is 0 add nothing, and need no gradient
        directions = self._directions(v, part)
        if not directions:
            return torch.zeros_like(w)
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
            moved = along(wanted, against)
            del wanted, against
            with self._held(leaves):
                return _joined(torch.autograd.grad(moved, leaves, materialize_grads=True))

    def _graph(
        self, leaves: list[Tensor], batch: AnyBatch, wanted: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """The gradients by some leaves, in autograd's graph."""
        loss = differentiable(self._forward(leaves, batch, stacked=False, twice=True))
        inputs = [leaves[i] for i in wanted]
        with self._held(leaves):
            return torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)

    def _directions(self, v: Tensor, part: Part | None) -> dict[int, Tensor]:
        """The tensors of v that are not 0, by their place, with v taken as 0 outside a part."""
        if part is None:
            return {i: d for i, d in enumerate(self._views(v)) if not known_zero(d)}
        touched = self._touched(part)
        views = self._views(v if part.size == self._length(touched) else part.only(v))
        return {i: views[i] for i in touched}

    def _touched(self, part: Part | None) -> Sequence[int]:
        """The tensors of the vector that have numbers in a part, by their place."""
        if part is None:
            return range(len(self._sizes))
        if part.name not in self._tensors or self._parts.get(part.name) is not part:
            inside = torch.zeros(self.size, dtype=torch.bool)
            inside[part.index] = True
            parts = torch.split(inside, self._sizes)
            self._tensors[part.name] = [i for i, inside in enumerate(parts) if inside.any()]
        return self._tensors[part.name]

    def _length(self, wanted: Sequence[int]) -> int:
        """The numbers in these tensors."""
        whole = len(wanted) == len(self._sizes)
        return self.size if whole else sum(self._sizes[i] for i in wanted)

    def _draws_nothing(self) -> bool:
        """Whether a training pass is known to draw no random numbers."""
        return self._loss_function in PLAIN_LOSSES and self._facts().draws_nothing

    def _facts(self) -> ModuleFacts:
        """What calls of the module need to know about it."""
        if self._known is None or self._known.module is not self._module:
            self._known = ModuleFacts.of(self._module, bool(self._statistics))
        return self._known

    def _unflatten(self, w: Tensor) -> dict[str, Tensor]:
        views = self._views(w)
        return {name: views[place] for name, place in self._names.items()}

    def _views(self, w: Tensor) -> list[Tensor]:
        """The parameters in w (or in every row of a stack), as views."""
        if w.ndim == 1 and not w.requires_grad and all(self._sizes):
            return list(_unflatten_dense_tensors(w, self._shaped))  # type: ignore[no-untyped-call]
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

    def _mode(self, seed: int | None) -> AbstractContextManager[None]:
        """Evaluation mode without a seed; with one, training mode with random draws from it."""
        if self._module.training != (seed is not None):
            self._set_training(seed is not None)
        plain = seed is None or self._draws_nothing()
        if plain and not self._has_buffers:
            return nullcontext()
        return watched(self._module, self._has_buffers, None if plain else seed, self._like.device)

    def _set_training(self, training: bool) -> None:
        self._module.train(training)
        for name in self._always_evaluated:
            self._module.get_submodule(name).training = False


class JointDerivatives:
    """Derivatives of a stack by the parameters and by the inputs (a tensor), as Gram space needs.

    Those by the inputs are None unless they are asked for.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective, self._fast = objective, objective._fast

    @property
    def closed_form(self) -> bool:
        """Whether they are written out for this module, which pays for a stack of one, too."""
        return self._fast is not None

    def grad(
        self,
        w: Tensor,
        batch: AnyBatch,
        by_inputs: bool = False,
        wanted: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients; those by other tensors than the ``wanted`` ones may be left undefined."""
        batch, unflatten = Batch(*batch), self._objective._unflatten
        if self._fast is not None:
            gradient = torch.empty_like(w)
            into = unflatten(gradient)
            if wanted is not None:
                names = self._objective._names
                into = {n: tensor for n, tensor in into.items() if names[n] in wanted}
            inputs = self._fast.gradient(
                unflatten(w),
                self._flat(batch.inputs, w.ndim > 1),
                cast_like(batch.targets, self._objective._like),
                into=into,
                by_inputs=by_inputs,
            )
            return gradient, inputs
        leaves, leafy = _leaves(w, batch, by_inputs)
        with torch.enable_grad():
            loss = differentiable(self._objective.forward(leaves[0], leafy).sum())
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        return gradients[0], gradients[1] if by_inputs else None

    def hvp(
        self,
        w: Tensor,
        batch: AnyBatch,
        v: Tensor,
        change: Tensor | None = None,
        wanted: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The Hessian-vector products along v, and ``change`` of the inputs.

        ``wanted`` are the tensors in which v is not 0, if that is known.
        """
        batch, unflatten = Batch(*batch), self._objective._unflatten
        if self._fast is not None:
            product, changes = torch.empty_like(w), unflatten(v)
            if wanted is not None:
                names = self._objective._names
                changes = {n: tensor for n, tensor in changes.items() if names[n] in wanted}
            inputs = self._fast.product(
                unflatten(w),
                changes,
                self._flat(batch.inputs, w.ndim > 1),
                change,
                cast_like(batch.targets, self._objective._like),
                into=unflatten(product),
            )
            return product, inputs
        leaves, leafy = _leaves(w, batch, change is not None)
        directions = [v] if change is None else [v, change]
        with torch.enable_grad():
            loss = differentiable(self._objective.forward(leaves[0], leafy).sum())
            gradient = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
            # a loss that is linear in a leaf has a gradient that does not depend on it
            used = [i for i, g in enumerate(gradient) if g.requires_grad]
            if not used:
                return torch.zeros_like(w), None if change is None else torch.zeros_like(change)
            moved = along([gradient[i] for i in used], [directions[i] for i in used])
            products = torch.autograd.grad(moved, leaves, materialize_grads=True)
        return products[0], None if change is None else products[1]

    def _flat(self, inputs: Inputs, stacked: bool) -> Tensor:
        """The inputs of a perceptron, (agents, samples, features); of one agent without agents."""
        assert isinstance(inputs, Tensor)
        return cast_like(inputs, self._objective._like).flatten(2 if stacked else 1)


def _leaves(w: Tensor, batch: Batch, by_inputs: bool) -> tuple[list[Tensor], Batch]:
    """The leaves of a stack in autograd's graph, and the batch that holds them."""
    leaves = [w.detach().requires_grad_()]
    if by_inputs:
        assert isinstance(batch.inputs, Tensor)
        leaves.append(batch.inputs.detach().requires_grad_())
        batch = batch._replace(inputs=leaves[1])
    return leaves, batch


def features_of(objective: Objective, w: Tensor, inputs: Inputs) -> Tensor:
    """The head's inputs for ``inputs`` in evaluation mode; not defined for a stack."""
    head = list(objective.layers)[-1]
    calls = objective.layer_inputs(w, inputs, [head])[head]
    if len(calls) != 1:
        raise InputError(
            f"the model's last layer ({head or 'the model itself'}) is called "
            f"{len(calls)} times: features need a layer that is called once"
        )
    return calls[0]


def linear_head(objective: Objective) -> nn.Linear:
    """The last layer, which tells the numbers of features and classes; its values are not valid."""
    *_, (name, head) = objective.layers.items()
    if not isinstance(head, nn.Linear):
        raise InputError(
            f"the model's last layer ({name or 'the model itself'}) is a {type(head).__name__}: "
            "this algorithm needs a torch.nn.Linear; change the model or use another algorithm"
        )
    return head


@contextmanager
def edited_features(objective: Objective, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, the head gets ``edit(z)`` in place of its inputs z; not defined for a stack.

    ``edit`` may also return z as it is. In :meth:`Objective.forward` z is in autograd's graph.
    Batches stay whole (:mod:`nufed.objective.micro_batches`), and derivatives are autograd's.
    """
    head = objective._module.get_submodule(list(objective.layers)[-1])
    hook = head.register_forward_pre_hook(lambda _, given: (edit(given[0]), *given[1:]))
    micro, objective._micro = objective._micro, MicroBatches(0)
    closed, objective._closed = objective._closed, False
    try:
        yield
    finally:
        objective._micro, objective._closed = micro, closed
        hook.remove()


def grad_with_features(
    objective: Objective, w: Tensor, batch: AnyBatch, term: Callable[[Tensor], Tensor]
) -> Tensor:
    """∇ of f(w, batch) + term(z), with the head's inputs z in this training pass; of no stack.

    >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    >>> objective, batch = Objective(net, F.mse_loss), (torch.ones(1, 1), torch.zeros(1, 1))
    >>> grad_with_features(objective, torch.tensor([2.0, 0.0]), batch, lambda z: 3 * z.sum())
    tensor([3., 0.])
    """
    terms: list[Tensor] = []

    def keep(z: Tensor) -> Tensor:
        terms.append(term(z))
        return z

    leaf = w.detach().requires_grad_()
    with torch.enable_grad(), edited_features(objective, keep):
        loss = objective.forward(leaf, batch) + sum(terms)
    return differentiated(objective, w, loss, [leaf])[0]


def differentiated(
    objective: Objective, w: Tensor, loss: Tensor, leaves: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of a loss that :meth:`Objective.forward` gave at w, also where layers are
    computed again for them."""
    with objective._held(objective._views(w)):
        return torch.autograd.grad(loss, leaves)


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
