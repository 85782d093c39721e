"""Batches of samples, and the protocol of objectives that algorithms use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from nufed.objective.objective import Objective

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Batch(NamedTuple):
    """Samples, and the seed of their dropout masks.

    ``inputs`` is a tensor, a tuple of tensors (``module(*inputs)``) or a mapping
    (``module(**inputs)``). With a ``seed`` the module runs in training mode and its random layers
    draw from that seed: the same batch always has the same masks. Without one it runs in
    evaluation mode.
    """

    inputs: Inputs
    targets: Tensor
    seed: int | None = None


AnyBatch: TypeAlias = Batch | tuple[Inputs, Tensor]


class AnyObjective(Protocol):
    """What fine-tuning, meta-gradients and algorithms require of an objective."""

    @property
    def base(self) -> Objective:
        """The objective on the module's own parameters."""

    @property
    def double(self) -> AnyObjective:
        """This objective in float64."""

    def grad(self, w: Tensor, batch: AnyBatch) -> Tensor:
        """∇f(w, batch)."""

    def hvp(self, w: Tensor, batch: AnyBatch, v: Tensor) -> Tensor:
        """∇²f(w, batch)·v."""

    def beside(
        self, w: Tensor, batch: AnyBatch, v: Tensor, step: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """∇f(w+δv) and ∇f(w−δv) with δ = ``step``."""

    def predict(self, w: Tensor, inputs: Inputs) -> Tensor:
        """The module's outputs for ``inputs`` in evaluation mode."""

    def norm(self, w: Tensor) -> Tensor:
        """‖w‖, or an upper bound, in a shape that broadcasts with w."""
