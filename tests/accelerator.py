"""A test accelerator: a torch device, written in Python, whose tensors compute on the CPU.

``import accelerator`` registers the device ``"fake"``. It serves to try, without a GPU, what code
gets wrong on one: tensors left on the CPU, needless copies between host and device, and points
where the host waits for the device. Its results are the CPU's, to the bit.

How it works. torch reserves a dispatch key for devices of other packages and, experimentally, takes
one in Python. A tensor of the device has a storage without memory; beside it a table holds the CPU
tensor with its numbers. A fallback for every operation replaces tensors of the device by those,
computes, and wraps the results. Views need no care of their own: the CPU tensors share memory.

Like a GPU,

* it refuses to mix with tensors of the CPU, but for those without dimensions; it refuses indices on
  the CPU, too, which CUDA would copy silently;
* its tensors can't become NumPy arrays;
* it has a random generator of its own: ``torch.manual_seed`` seeds it and ``torch.random.fork_rng``
  saves it; seeding the CPU's generator alone does not. It draws what the CPU's would;
* it counts copies to and from the device, and synchronisations: reads of a number (``item``,
  ``if``) and results whose shape depends on numbers (``nonzero``, boolean masks).

Unlike one, it has no float32 of its own accuracy, no streams, and one device only: what torch takes
in Python for a device has no index.

Registering it renames a backend and starts autograd's thread of the device, after which the process
can't fork workers that train. So tests that use it run in a process of their own
(``test_accelerator.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "fake"
META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
SWEEP = 4096  # new tensors, after which numbers of those that are gone are freed
WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations whose result the host has to wait for: a number, or a tensor whose shape depends on
numbers. Indexing with a mask calls ``nonzero``."""

counts = {"to_device": 0, "to_host": 0, "synchronised": 0}
waits: list[str] = []  # the operations that synchronised
_numbers: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}
_generator = torch.Generator()
refused: set[torch.dtype] = set()  # dtypes that the device lacks, as mps lacks float64


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Copies and synchronisations inside the block."""
    before, found = dict(counts), dict[str, int]()
    waits.clear()
    yield found
    found.update({name: number - before[name] for name, number in counts.items()})


def is_on(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == NAME


def numbers_of(x: torch.Tensor) -> torch.Tensor:
    """The CPU tensor with the numbers of a tensor of the device, which share memory."""
    _, held = _numbers[x.untyped_storage()._cdata]
    if held.dtype != x.dtype:  # view(dtype) keeps the storage
        held = held.view(x.dtype)
    place = x.shape, x.stride(), x.storage_offset()
    if (held.shape, held.stride(), held.storage_offset()) != place:  # so does detach()
        held = held.as_strided(*place)
    return held


def wrapped(held: torch.Tensor) -> torch.Tensor:
    """A tensor of the device with these numbers."""
    if held.dtype in refused:
        raise TypeError(f"the test accelerator has no {held.dtype}")
    made = torch._C._acc.create_empty_tensor((held.numel(),), held.dtype)
    if held.ndim != 1 or held.storage_offset() or not held.is_contiguous():
        # the device's own as_strided would come back here; that for shapes alone sets strides
        place = held.shape, held.stride(), held.storage_offset()
        made = torch.ops.aten.as_strided.default.redispatch(META, made, *place)
    if len(_numbers) % SWEEP == SWEEP - 1:
        for key in [key for key, (owner, _) in _numbers.items() if owner.expired()]:
            del _numbers[key]
    storage = made.untyped_storage()
    _numbers[storage._cdata] = StorageWeakRef(storage), held
    return made


@contextmanager
def _drawing(op: Any) -> Iterator[None]:
    """Let an operation that draws random numbers use the device's generator."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    host = torch.get_rng_state()
    torch.set_rng_state(_generator.get_state())
    try:
        yield
    finally:
        _generator.set_state(torch.get_rng_state())
        torch.set_rng_state(host)


def _copy(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if is_on(source) != is_on(target):
        counts["to_device" if is_on(target) else "to_host"] += 1
    ends = (numbers_of(x) if is_on(x) else x for x in (source, target))
    held = next(ends)
    next(ends).copy_(held)
    return target


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation on tensors of the device."""
    if op is torch.ops.aten._copy_from.default:
        return _copy(*args[:2])
    if op.overloadpacket.__name__ in WAITING:
        counts["synchronised"] += 1
        waits.append(str(op))
    inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def unwrapped(x: Any) -> Any:
        if is_on(x):
            inputs.append((numbers_of(x), x))
            return inputs[-1][0]
        if isinstance(x, torch.Tensor) and x.ndim:
            raise RuntimeError(f"{op}: a tensor of the CPU among tensors of the test accelerator")
        if isinstance(x, torch.device) and x.type == NAME:
            return torch.device("cpu")
        return x

    args, kwargs = tree_map(unwrapped, (args, kwargs))
    with _drawing(op):
        results = op(*args, **kwargs)
    for held, x in inputs:
        if (held.shape, held.stride()) != (x.shape, x.stride()):  # resized by out=
            x.data = wrapped(held)

    def rewrapped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        same = (tensor for held, tensor in inputs if held is x)  # of an in-place operation
        found = next(same, None)
        return wrapped(x) if found is None else found

    return tree_map(rewrapped, results)


class Backend(_DummyBackendModule):
    """``torch.fake``: the device's generator."""

    def manual_seed_all(self, seed: int) -> None:
        _generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return _generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        _generator.set_state(state)


def _as_strided_(x: torch.Tensor, *place: Any) -> torch.Tensor:
    """unsqueeze_() and the like; torch's own checks a storage's size, which is 0 here."""
    x.data = wrapped(numbers_of(x).as_strided(*place))
    return x


def _convolution(*args: Any) -> Any:
    return fallback(torch.ops.aten.convolution.default, *args)


def _convolution_backward(by_output: Any, inputs: Any, weight: Any, *args: Any) -> Any:
    *_, transposed, _, groups, _ = args
    biases = weight.shape[1] * groups if transposed else weight.shape[0]
    given = by_output, inputs, weight, [biases], *args
    return fallback(torch.ops.aten.convolution_backward.default, *given)


_setup_privateuseone_for_python_backend(NAME, Backend())
_library = torch.library.Library("_", "IMPL")
_library.fallback(fallback, "PrivateUse1")
_aten = torch.library.Library("aten", "IMPL")
_aten.impl("as_strided_", _as_strided_, "PrivateUse1")
# these have a kernel of the CPU, and a formula that rounds otherwise for devices that have none
for _op in (torch.ops.aten.native_group_norm.default, torch.ops.aten.native_layer_norm.default):
    _aten.impl(_op.overloadpacket.__name__, partial(fallback, _op), "PrivateUse1")
# torch asks devices of other packages for convolutions under names of their own
_aten.impl("convolution_overrideable", _convolution, "PrivateUse1")
_aten.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
