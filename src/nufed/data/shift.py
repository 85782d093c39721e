"""Feature and label shift: agents in groups, whose samples are transformed group by group.

Partitions decide who holds which rows; a shift then changes the rows of each agent, in a copy of
the samples. Agent i belongs to group i mod the number of groups. The shift is a function of
configuration, seed and split, so that nothing else is recorded: the digests of the data and the
split are those before the shift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nufed.data.partition import Rows
from nufed.data.samples import Samples
from nufed.data.split import PARTS, Split
from nufed.errors import InputError, require, require_whole
from nufed.seeding import stream


def rotation(
    samples: Samples, agents: Sequence[Rows], seed: int, angles: Sequence[float] = (0, 90, 180, 270)
) -> Samples:
    """Feature shift: every group of agents has its images rotated by its own angle.

    Images are (height, width) or (channels, height, width). Multiples of 90° only move pixels (90°
    and 270° need square images); other angles interpolate bilinearly about the centre, with 0
    outside of the image.

    Args:
        samples: the samples of all agents.
        agents: the rows of every agent.
        seed: not used.
        angles: one per group, in degrees, counter-clockwise.
    """
    numbers = isinstance(angles, Sequence) and all(
        isinstance(a, int | float) and math.isfinite(a) for a in angles
    )
    require(
        numbers and len(angles) > 0, "angles", angles, "must be a list of finite numbers, degrees"
    )
    shape, images = samples.input_shape, samples.inputs
    if not isinstance(images, Tensor) or len(shape) not in (2, 3):
        raise InputError(
            'data.shift = "rotation" needs images as (height, width) or (channels, height, '
            f"width), and the data has shape {shape}: reshape it, or use another shift"
        )
    if shape[-1] != shape[-2] and any(angle % 180 == 90 for angle in angles):
        raise InputError(
            f'data.shift = "rotation" by 90° or 270° needs square images, and the data has shape '
            f"{shape}: set data.shift_args = {{angles = [0, 180]}}"
        )
    turned = images.clone()
    for group, angle in enumerate(angles):
        rows = _rows_of(agents, group, len(angles))
        turned[rows] = _rotated(images[rows], angle)
    return replace(samples, inputs=turned)


def permuted_labels(
    samples: Samples, agents: Sequence[Rows], seed: int, groups: int = 4
) -> Samples:
    """Label shift: every group of agents has its classes permuted in its own way.

    Group 0 keeps the classes; each other group uses a permutation drawn from the seed, so that the
    same input has another class there. No global model fits two groups at once.

    Args:
        samples: the samples of all agents.
        agents: the rows of every agent.
        seed: of the permutations.
        groups: the number of groups.
    """
    require_whole(groups=groups)
    if not samples.classes:
        raise InputError(
            'data.shift = "permuted_labels": this data has no classes; use data with classes, or '
            "another shift"
        )
    targets = samples.targets.clone()
    for group in range(1, groups):
        rows = _rows_of(agents, group, groups)
        order = stream(seed, "permuted labels", agent=group).permutation(len(samples.classes))
        targets[rows] = torch.from_numpy(order)[samples.targets[rows]]
    return replace(samples, targets=targets)


SHIFTS: dict[str, Callable[..., Samples]] = {
    "rotation": rotation,
    "permuted_labels": permuted_labels,
}


def rows_by_agent(split: Split) -> list[Rows]:
    """All rows of every agent; refused if two agents share one, which can't have two shifts."""
    if split.recipe is None:
        parts = [getattr(split, part) for part in PARTS]
        rows = [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]
        together = np.concatenate(rows)
        if len(np.unique(together)) == len(together):
            return rows
    raise InputError(
        "data.shift changes samples agent by agent, and in this split agents share samples: set "
        'data.reuse = "never", or data.shift = "none"'
    )


def _rows_of(agents: Sequence[Rows], group: int, groups: int) -> Tensor:
    members = agents[group::groups]
    return torch.from_numpy(np.concatenate(members) if members else np.zeros(0, np.int64))


def _rotated(images: Tensor, angle: float) -> Tensor:
    """Images rotated counter-clockwise, in their own dtype."""
    quarters, rest = divmod(angle, 90)
    if not rest:
        return torch.rot90(images, int(quarters) % 4, (-2, -1))
    height, width = images.shape[-2:]
    planes = images.reshape(len(images), -1, height, width)
    turn = math.radians(angle)
    ratio = height / width  # grid coordinates are −1 … 1 on both axes
    matrix = [
        [math.cos(turn), -math.sin(turn) * ratio, 0.0],
        [math.sin(turn) / ratio, math.cos(turn), 0.0],
    ]
    theta = torch.tensor(matrix, dtype=torch.float64).expand(len(images), 2, 3)
    grid = F.affine_grid(theta, list(planes.shape), align_corners=False)
    turned = F.grid_sample(planes.double(), grid, align_corners=False).reshape(images.shape)
    if not images.is_floating_point():
        turned = turned.round()
    return turned.to(images.dtype)
