"""What torch computes with: the device of ``device = "auto"``, and the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

ACCELERATORS: dict[str, Callable[[], bool]] = {
    "cuda": torch.cuda.is_available,
    "xpu": torch.xpu.is_available,
    "mps": torch.backends.mps.is_available,
}


def picked_device(name: str) -> str:
    """The device itself; ``auto``: the first accelerator that torch can use here, or the CPU.

    A run records what was picked, so that it is resumed on the same device.
    """
    if name != "auto":
        return name
    return next((name for name, usable in ACCELERATORS.items() if usable()), "cpu")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads inside the block, and restore it afterwards.

    Bits depend on it, and more threads slow down small products.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
