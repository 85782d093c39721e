"""The largest eigenvalue of a symmetric operator, by Lanczos iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from torch import Tensor

Operator: TypeAlias = Callable[[Tensor], Tensor]


def spectral_norm(operator: Operator, start: Tensor, iterations: int = 16) -> float:
    """A lower bound on the largest absolute eigenvalue of a symmetric operator, by Lanczos.

    >>> import torch
    >>> matrix = torch.diag(torch.tensor([1.0, -5.0, 2.0], dtype=torch.float64))
    >>> round(spectral_norm(lambda v: matrix @ v, torch.ones(3, dtype=torch.float64)), 6)
    5.0
    """
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside: list[float] = []
    v = start / start.norm()
    for _ in range(min(iterations, start.numel())):
        basis.append(v)
        image = operator(v)
        diagonal.append(float(image @ v))
        for b in (*basis, *basis):  # reorthogonalised twice
            image = image - (image @ b) * b
        length = float(image.norm())
        if length < 1e-12 * (1 + abs(diagonal[0])):
            break
        beside.append(length)
        v = image / length
    beside = beside[: len(diagonal) - 1]
    matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    return float(np.abs(np.linalg.eigvalsh(matrix)).max())
