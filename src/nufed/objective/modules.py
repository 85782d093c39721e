"""Checks and helpers for modules and tensors, used by objectives."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nufed.errors import InputError
from nufed.objective.batch import Batch, Inputs

RunningStats: TypeAlias = Literal["refuse", "frozen", "tracked"]
"""How running statistics are treated; see :class:`nufed.Objective`."""
Precision: TypeAlias = Literal["float32", "bfloat16"]
"""In which a module is computed; see :class:`nufed.Objective`."""
MemoryFormat: TypeAlias = Literal["contiguous", "channels_last"]
"""How images and kernels are laid out in memory; see :class:`nufed.Objective`."""
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
Slots: TypeAlias = dict[str, tuple[dict[str, Any], str]]
"""Where a module keeps its tensors: of each name the mapping and its key."""
NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
DETERMINISTIC = {
    nn.Sequential, nn.ModuleList, nn.Identity, nn.Flatten, nn.Unflatten, nn.Linear, nn.Embedding,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.GroupNorm, nn.LayerNorm, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.Softplus,
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
}  # fmt: skip
"""Layers of torch that draw no random numbers; others may say so by ``draws_nothing = True``."""
STATISTICS = ("running_mean", "running_var")
COUNTER = "num_batches_tracked"


def cast_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Move to the device of ``like``; floating-point values also take its dtype."""
    dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
    if tensor.dtype == dtype and tensor.device == like.device:  # `to` takes longer to find out
        return tensor
    return tensor.to(like.device, dtype)


def channels_last(tensor: Tensor) -> Tensor:
    """A tensor of images or kernels with their channels last in memory; others as they are."""
    if tensor.ndim not in CHANNELS_LAST:
        return tensor
    return tensor.contiguous(memory_format=CHANNELS_LAST[tensor.ndim])


def has_kernels(module: nn.Module) -> bool:
    """Whether it has parameters that :func:`channels_last` lays out in another way."""
    return any(parameter.ndim in CHANNELS_LAST for parameter in module.parameters())


def has_hooks(layer: nn.Module) -> bool:
    """Whether hooks may change what a layer computes, or its gradients."""
    forward = layer._forward_hooks or layer._forward_pre_hooks
    return bool(forward or layer._backward_hooks or layer._backward_pre_hooks)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's random generator inside the block, and restore its state afterwards."""
    if device.type != "cpu":
        with torch.random.fork_rng([device], device_type=device.type):
            torch.manual_seed(seed)
            yield
        return
    # like fork_rng, but sixty times faster, for the CPU alone
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module that shares the memory of its frozen parameters, which nothing changes."""
    frozen: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=False)
        for p in module.parameters()
        if not p.requires_grad
    }
    return copy.deepcopy(module, frozen)


def logits_of(outputs: Any) -> Tensor:
    """A module's outputs: the ``logits`` of a mapping or dataclass, anything else as it is."""
    if isinstance(outputs, Tensor):
        return outputs
    by_name = outputs.get("logits") if isinstance(outputs, Mapping) else None
    logits: Tensor = getattr(outputs, "logits", outputs) if by_name is None else by_name
    return logits


def layers_with_running_stats(module: nn.Module) -> list[str]:
    return [
        name
        for name, layer in module.named_modules()
        if any(b.startswith("running_") for b, _ in layer.named_buffers(recurse=False))
    ]


def known_zero(tensor: Tensor) -> bool:
    """Whether all numbers are 0; False on a device, which the host would have to wait for."""
    if not tensor.numel():
        return True
    if tensor.device.type != "cpu":
        return False
    if tensor.reshape(-1)[0] != 0:  # the usual case, decided by one number
        return False
    low, high = torch.aminmax(tensor)
    return bool(low == 0) and bool(high == 0)


def tensor_slots(module: nn.Module) -> Slots:
    """Where a module keeps its parameters and buffers."""
    slots: Slots = {}
    for prefix, layer in module.named_modules(remove_duplicate=False):
        for tensors in (layer._parameters, layer._buffers):
            slots |= {f"{prefix}.{key}".lstrip("."): (tensors, key) for key in tensors}
    return slots


@dataclass(frozen=True)
class ModuleFacts:
    """What calls of a module need to know about it.

    Args:
        module: the module.
        slots: where it keeps its tensors.
        counters: batch counters for its layers to increment, if it has tracked statistics.
        draws_nothing: whether it is known to draw no random numbers.
    """

    module: nn.Module
    slots: Slots
    counters: dict[str, Tensor]
    draws_nothing: bool

    @classmethod
    def of(cls, module: nn.Module, tracked: bool) -> ModuleFacts:
        layers = list(module.modules())
        plain = all(type(layer) in DETERMINISTIC or _says_so(layer) for layer in layers)
        hooks = any(map(has_hooks, layers))
        counters = batch_counters(module) if tracked else {}
        return cls(module, tensor_slots(module), counters, plain and not hooks)


def _says_so(layer: nn.Module) -> bool:
    return bool(vars(type(layer)).get("draws_nothing"))


def call_arguments(inputs: Inputs, like: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The arguments with which a module is called."""
    if isinstance(inputs, Tensor):
        return (cast_like(inputs, like),), {}
    if isinstance(inputs, Mapping):
        return (), {name: cast_like(x, like) for name, x in inputs.items()}
    return tuple(cast_like(x, like) for x in inputs), {}


@contextmanager
def holding(slots: Slots, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module hold other parameters and buffers inside the block, given by name.

    What ``torch.func.functional_call`` does without untying, in a tenth of its time: the
    ``slots`` of the module (:func:`tensor_slots`) are known.
    """
    places = [slots[name] for name in tensors]
    before = [holder[key] for holder, key in places]
    try:
        for (holder, key), tensor in zip(places, tensors.values(), strict=True):
            holder[key] = tensor
        yield
    finally:
        for (holder, key), tensor in zip(places, before, strict=True):
            holder[key] = tensor


def along(tensors: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor:
    """A scalar whose derivatives by these tensors are the directions.

    ``torch.autograd.grad`` of it needs no ``grad_outputs``, on whose first use torch imports sympy,
    a quarter of a second and 30 MB.
    """
    return _Along.apply(*tensors, *directions)  # type: ignore[no-any-return, no-untyped-call]


class _Along(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *both: Tensor) -> Tensor:
        ctx.directions = both[len(both) // 2 :]
        return both[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return *ctx.directions, *(None for _ in ctx.directions)


class MovedStatistics:
    """Running statistics that the last training pass moved, and what it was, so that a step whose
    gradient was just taken needs no second pass to move them.
    """

    def __init__(self) -> None:
        self._statistics: list[Tensor] = []
        self._w: Callable[[], Tensor | None] = lambda: None
        self._version, self._batch = 0, Batch((), torch.empty(0))

    def keep(self, statistics: list[Tensor], w: Tensor, batch: Batch) -> None:
        """Keep statistics that a pass with these parameters and samples made."""
        self._statistics, self._w, self._version = statistics, weakref.ref(w), w._version
        self._batch = batch

    def of(self, w: Tensor, batch: Batch) -> list[Tensor] | None:
        """The statistics, if they were made by this very vector and batch; None if not."""
        same = self._w() is w and self._version == w._version
        same = same and self._batch.inputs is batch.inputs and self._batch.seed == batch.seed
        return self._statistics if same else None


def norm_layers(module: nn.Module) -> set[str]:
    """The names of normalisation layers."""
    return {name for name, layer in module.named_modules() if isinstance(layer, NORM_LAYERS)}


def tracked_statistics(module: nn.Module) -> dict[str, Tensor]:
    """The running statistics of a module by name; its layers must be torch's own."""
    statistics: dict[str, Tensor] = {}
    for name in layers_with_running_stats(module):
        layer = module.get_submodule(name)
        if not isinstance(layer, nn.modules.batchnorm._NormBase) or layer.momentum is None:
            raise InputError(
                f"the running statistics of {name} can't be tracked: it must be a BatchNorm or "
                "InstanceNorm layer of torch with a momentum; set it, or pass "
                'running_stats="frozen"'
            )
        statistics |= {f"{name}.{kind}".lstrip("."): getattr(layer, kind) for kind in STATISTICS}
    return statistics


def batch_counters(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the batch counters, which layers increment in training and nothing reads."""
    return {n: b.clone() for n, b in module.named_buffers() if n.rpartition(".")[2] == COUNTER}


def check_tensors(module: nn.Module) -> None:
    """Refuse a module with uninitialised parameters or buffers."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                f"the module's {name} is not initialized, as a lazy layer has not seen an input "
                "yet: call the module once on a batch, or give the layer its sizes"
            )
        if tensor.is_meta:
            raise InputError(
                f"the module's {name} is on the meta device and holds no values: build the module "
                "on a real device, or load its weights first"
            )


def check_parameters(module: nn.Module, parameters: list[nn.Parameter]) -> None:
    if not parameters:
        raise InputError(
            f"{type(module).__name__} has no trainable parameters: pass a module with at least one "
            "parameter whose requires_grad is True"
        )
    kinds = sorted({f"{p.dtype} on {p.device}" for p in parameters})
    if len(kinds) > 1:
        raise InputError(
            f"the module's parameters are of several kinds ({', '.join(kinds)}): convert it to "
            "one, for example with module.to(torch.float32)"
        )
    if not parameters[0].is_floating_point():
        raise InputError(
            f"the module's parameters are {parameters[0].dtype}: they must be floating-point"
        )


@contextmanager
def watched(
    module: nn.Module, has_buffers: bool, seed: int | None, device: torch.device
) -> Iterator[None]:
    """Random draws from a seed, if there is one, and a check of the module's own buffers."""
    buffers = dict(module.named_buffers()) if has_buffers else {}
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    versions = {name: buffer._version for name, buffer in buffers.items()}
    with nullcontext() if seed is None else seeded(seed, device):
        yield
    if has_buffers and (device.type == "cpu" or _written(module, buffers, versions)):
        check_buffers(module, before)


def _written(module: nn.Module, buffers: Mapping[str, Tensor], versions: Mapping[str, int]) -> bool:
    """Whether buffers were replaced or written to, by their identity and version counters."""
    after = dict(module.named_buffers())
    same = after.keys() == buffers.keys() and all(after[n] is b for n, b in buffers.items())
    return not same or any(b._version != versions[n] for n, b in buffers.items())


def check_buffers(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Refuse a module whose forward pass changed its buffers from ``before``."""
    for name, buffer in module.named_buffers():
        old = before.get(name)
        same = old is not None and torch.allclose(buffer, old, rtol=0, atol=0, equal_nan=True)
        if not same:
            raise InputError(
                f"the module's forward changes its buffer {name!r}, and such state cannot be "
                "part of a meta-gradient; remove the layer that keeps it, or put that layer "
                "into evaluation mode before giving the module to nufed"
            )
