"""``device = "auto"``: the accelerator of this machine."""

from __future__ import annotations

from collections.abc import Callable

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
