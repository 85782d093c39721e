"""Frozen parameters in float64 without a copy of all of them.

Finite differences of gradients need float64. What is frozen may be most of a model, and every
process would hold it a second time, at twice its size. So a frozen parameter keeps its dtype and is
converted by each operation that uses it: at any time only those of one operation exist in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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

    def __enter__(self) -> InDouble:
        self._frozen = {id(p) for p in self.parameters}  # not those of another process
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

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
            wide = x.double()
            sources[wide.data_ptr()] = x
            return wide

        def pack(x: Tensor) -> Tensor | _Saved:
            source = sources.get(x.untyped_storage().data_ptr())
            return x if source is None else _Saved(source, x.size(), x.stride(), x.storage_offset())

        args, kwargs = tree_map_only(Tensor, converted, (args, kwargs))
        if not sources:
            return func(*args, **kwargs)
        with saved_tensors_hooks(pack, _unpack):
            return func(*args, **kwargs)


def _unpack(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.source.double().as_strided(saved.size, saved.stride, saved.offset)
