"""Frozen parameters in float64 without a copy of all of them.

Finite differences of gradients need float64. What is frozen may be most of a model, and every
process would hold it a second time, at twice its size. So a frozen parameter keeps its dtype and is
converted by each operation that uses it: at any time only those of one operation exist in float64.
"""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only


def doubled(module: nn.Module, replaced: Mapping[int, Any]) -> nn.Module:
    """A copy of a module in float64 whose frozen parameters are the same, in their dtype.

    ``replaced``: what takes the place of its other parameters, by ``id``. Layers of transformers
    are not computed again in backward passes, which would happen outside of :class:`InDouble`.
    """
    frozen = {id(p): p for p in module.parameters() if not p.requires_grad}
    empty = {key: nn.Parameter(p.new_empty(0), requires_grad=False) for key, p in frozen.items()}
    wide = copy.deepcopy(module, {**empty, **replaced}).double()
    originals = {id(stand_in): frozen[key] for key, stand_in in empty.items()}
    for layer in wide.modules():
        if hasattr(layer, "gradient_checkpointing"):
            vars(layer)["gradient_checkpointing"] = False
        for name, parameter in list(layer._parameters.items()):
            if id(parameter) in originals:
                setattr(layer, name, originals[id(parameter)])
    return wide


def release_memory() -> None:
    """Return freed memory to the system, of which malloc keeps much."""
    if sys.platform == "linux":  # glibc has it, others may not
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        _ = trim and trim(0)


LARGE = 2**16  # numbers of a parameter, from which the memory of its copy is used again


class _Memory:
    """Memory for one large parameter in float64, used again once no tensor refers to it.

    Otherwise small tensors that are made meanwhile would keep most of it from being used again, and
    every process would grow by many times the size of a parameter.
    """

    def __init__(self, size: int) -> None:
        self.numbers = np.empty(size)
        self.unused = sys.getrefcount(self.numbers)

    def fits(self, size: int) -> bool:
        return len(self.numbers) >= size and sys.getrefcount(self.numbers) == self.unused

    def double(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.numbers)[: x.numel()].view(x.shape).copy_(x)


class _Saved(NamedTuple):
    """A view of a converted parameter that a backward pass needs, without its numbers."""

    source: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class InDouble(TorchFunctionMode):
    """Inside, operations take the frozen parameters of a module in float64.

    Backward passes convert them again.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        frozen = (p for p in module.parameters() if not p.requires_grad)
        self.parameters = [p for p in frozen if p.is_floating_point() and p.dtype != torch.float64]
        self._frozen: set[int] = set()
        self._memory = _Memory(0)

    def __enter__(self) -> InDouble:
        self._frozen = {id(p) for p in self.parameters}  # not those of another process
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        used, self._memory = len(self._memory.numbers), _Memory(0)
        if used:
            release_memory()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _double(self, x: Tensor) -> Tensor:
        if x.numel() < LARGE or x.device.type != "cpu":
            return x.double()
        if not self._memory.fits(x.numel()):
            self._memory = _Memory(x.numel())
        return self._memory.double(x)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:  # few of its rows
            return func(*args, **kwargs).double()
        if getattr(func, "__name__", "") == "__get__" and id(args[0]) in self._frozen:
            value = func(*args, **kwargs)
            if not isinstance(value, Tensor):  # a shape, a device, a dtype
                return torch.float64 if isinstance(value, torch.dtype) else value
        sources: dict[int, Tensor] = {}

        def converted(x: Tensor) -> Tensor:
            if id(x) not in self._frozen:
                return x
            wide = self._double(x)
            sources[wide.data_ptr()] = x
            return wide

        def pack(x: Tensor) -> Tensor | _Saved:
            source = sources.get(x.untyped_storage().data_ptr())
            return x if source is None else _Saved(source, x.size(), x.stride(), x.storage_offset())

        args, kwargs = tree_map_only(Tensor, converted, (args, kwargs))
        if not sources:
            return func(*args, **kwargs)
        with saved_tensors_hooks(pack, self._unpack):
            return func(*args, **kwargs)

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return self._double(saved.source).as_strided(saved.size, saved.stride, saved.offset)
