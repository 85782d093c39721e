"""Micro-batches: a loss and its derivatives as weighted sums over parts of a batch.

A loss that is a mean over n targets is Σ n_j/n · (its mean over the n_j targets of part j), and so
are its gradient and Hessian-vector products. A part needs the memory of its own samples only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nufed.errors import InputError
from nufed.objective.batch import Batch, Inputs
from nufed.seeding import stream, torch_seed

IGNORED = -100  # a whole-number target that torch's losses leave out


class MicroBatches:
    """Parts of batches with at most ``size`` samples; 0: batches stay whole.

    ``checked``: whether the loss is known to be such a mean.
    """

    def __init__(self, size: int) -> None:
        self.size, self.checked = size, False

    def parts(self, batch: Batch, stacked: bool = False) -> list[tuple[float, Batch]]:
        """The parts of a batch, each with its share of the targets.

        Each has random draws of its own.

        >>> x, y = torch.zeros(5, 1), torch.tensor([0, 1, 0, 1, -100])
        >>> [(share, len(part.targets)) for share, part in MicroBatches(2).parts(Batch(x, y))]
        [(0.5, 2), (0.5, 2)]
        """
        if stacked:
            raise InputError("micro_batch is for one agent at a time, not for stacks of agents")
        total, parts = _counted(batch.targets), []
        if len(batch.targets) <= self.size or not total:
            return [(1.0, batch)]
        pieces = zip(self.inputs(batch.inputs), torch.split(batch.targets, self.size), strict=True)
        for number, (inputs, targets) in enumerate(pieces):
            seed = batch.seed
            if seed is not None:
                seed = torch_seed(stream(seed, "micro batch", step=number))
            if count := _counted(targets):
                parts.append((count / total, Batch(inputs, targets, seed)))
        return parts

    def inputs(self, inputs: Inputs) -> list[Inputs]:
        """The inputs of the parts."""
        if isinstance(inputs, Tensor):
            return list(torch.split(inputs, self.size))
        if isinstance(inputs, Mapping):
            pieces = zip(*(torch.split(x, self.size) for x in inputs.values()), strict=True)
            return [dict(zip(inputs, piece, strict=True)) for piece in pieces]
        return list(zip(*(torch.split(x, self.size) for x in inputs), strict=True))

    def check(
        self, outputs: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Refuse a loss that is no mean over targets, once."""
        whole = float(loss(outputs, targets))
        pieces = zip(torch.split(outputs, self.size), torch.split(targets, self.size), strict=True)
        used = [(_counted(y), x, y) for x, y in pieces]
        total = sum(count for count, _, _ in used)
        parts = sum(count / total * float(loss(x, y)) for count, x, y in used if count)
        if abs(whole - parts) > 1e-3 * max(abs(whole), abs(parts)):
            raise InputError(
                f"= {self.size}: the loss of {len(targets)} samples is {whole:.4g}, and {parts:.4g}"
                " by micro-batches, as it is no mean over samples; set it to 0, or use such a loss",
                "model.micro_batch",
            )
        self.checked = True


def _counted(targets: Tensor) -> int:
    """How many targets a mean counts."""
    if targets.is_floating_point():
        return targets.numel()
    return int((targets != IGNORED).sum())
