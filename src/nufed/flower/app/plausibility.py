"""Which noisy updates can't be a clipped change plus noise, so that a private run rejects them.

A site's change over all its vectors has norm ≤ C and gets noise zC·g, g standard normal in d
dimensions. For any t > 0 (Gaussian concentration: the norm is 1-Lipschitz, and
d/√(d+1) ≤ E‖g‖ ≤ √d; a union bound over coordinates), each of

* ‖g‖ ≥ √d + t, and ‖g‖ ≤ d/√(d+1) − t, has probability at most exp(−t²/2),
* |gᵢ| ≥ t for some i has probability at most d·exp(−t²/2).

An update outside of C + zC times these bounds is rejected. With t² = 2 ln(3/p), for coordinates
t² = 2 ln(3d/p), an honest update is rejected with probability at most p, whatever its data. Below
the lower bound the site added too little noise, and the released ε would not hold.

What remains: a vector within these bounds, in any direction, can't be told from noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nufed.algorithms.protocol import State
from nufed.flower.app.privacy import Privacy

FALSE_REJECTION = 1e-20  # upper bound on the probability that an honest update is rejected


def implausible(vectors: State, received: State, privacy: Privacy) -> str | None:
    """Why vectors can't be those received plus a clipped change and noise; None: they can be.

    None also for vectors that :func:`nufed.server.checks.examine` rejects.
    """
    if not vectors or vectors.keys() - received.keys():
        return None
    for name, vector in vectors.items():
        ok = isinstance(vector, Tensor) and vector.shape == received[name].shape
        if not ok or not vector.isfinite().all():
            return None
    changes = torch.cat([(v.double() - received[n].double()).flatten() for n, v in vectors.items()])
    norm, largest = float(changes.norm()), float(changes.abs().max())
    dimension, clip, noise = changes.numel(), privacy.clip, privacy.noise * privacy.clip
    margin = math.sqrt(2 * math.log(3 / FALSE_REJECTION))
    most = clip + noise * (math.sqrt(dimension) + margin)
    least = noise * (dimension / math.sqrt(dimension + 1) - margin) - clip
    spread = math.sqrt(2 * math.log(3 * dimension / FALSE_REJECTION))
    most_coordinate = clip + noise * spread
    rounding = _rounding(vectors, received, most)
    for value, bound, wrong, what in (
        (norm, most, norm > most + rounding, "norm {}, above {}"),
        (norm, least, norm < least - rounding, "norm {}, below {}"),
        (largest, most_coordinate, largest > most_coordinate + rounding, "a number {}, above {}"),
    ):
        if wrong:
            return (
                f"its change has {what.format(f'{value:.4g}', f'{bound:.4g}')}: clipping to "
                f"{clip:g} and noise {privacy.noise:g} give that with probability below "
                f"{FALSE_REJECTION:g}"
            )
    return None


def _rounding(vectors: State, received: State, most: float) -> float:
    """Upper bound on the norm of the error of rounding vectors to their dtype at the site."""
    return sum(
        torch.finfo(v.dtype).eps * (float(received[n].double().norm()) + most)
        for n, v in vectors.items()
    )
