"""ANIL: fine-tuning of the head alone (almost no inner loop; Raghu et al., 2020).

gMeta whose step size is 0 outside the head: with m the indicator of the head's coordinates,

    min_w  (1/N) Σ_i f_i(w^i_ν),   w^i_0 = w,   w^i_{l+1} = w^i_l − α·m⊙∇f_i(w^i_l).

The meta-gradient is taken with respect to all of w, and the outer update changes all of w: the body
is trained so that it is good after the head is fine-tuned, and fine-tuning leaves it fixed.
Everything else is as in :mod:`nufed.algorithms.gmeta`: the server holds w (and learned rates),
agents keep nothing, and the personal model, of newcomers too, is the global one after ν steps of
the head. The optimiser drives the steps of w, with the meta-gradient as its gradient.

Known mistakes elsewhere: the body frozen in the outer update as well, which trains heads on random
features (an option of "meta-learning from scratch"). The tests also reject: the whole model
fine-tuned at evaluation; a meta-gradient without the second-order term of the body (∂²f/∂body∂head
is not 0: I − α∇²f·diag(m) has rows of the body); fine-tuning steps of the head that differ between
training and evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nufed.algorithms.gmeta import GMeta
from nufed.algorithms.protocol import Notes, State
from nufed.meta.fine_tuning import Rate
from nufed.objective import AnyObjective
from nufed.objective.parts import Part
from nufed.settings import setting


@dataclass(frozen=True)
class ANIL(GMeta):
    """ANIL: gMeta that fine-tunes the head alone (Raghu et al., 2020).

    Args:
        adapted: the part of the model that is fine-tuned, as :meth:`nufed.Objective.part` names it.
        others: as for :class:`GMeta`.
    """

    adapted: str = setting("head", "part that is fine-tuned: head, body, … or a name pattern")

    notes: ClassVar[Notes] = Notes(  # no theory: the bounds assume one step size for all
        newcomer="fine-tunes the head of the global model",
        optimized="steps of w, along the meta-gradient",
    )

    def rate(self, objective: AnyObjective, received: State) -> Rate:
        """The step size per coordinate: 0 outside the part that is fine-tuned."""
        everywhere = torch.zeros_like(received["model"]) + super().rate(objective, received)
        return objective.base.part(self.adapted).only(everywhere)

    def tuned_part(self, objective: AnyObjective) -> Part | None:
        """The part that is fine-tuned, if it has one step size and is not all of the model."""
        part = objective.base.part(self.adapted)
        several = self.rates_lr or isinstance(self.adapt_lr, Tensor)
        return None if several or part.size == objective.base.size else part

    @property
    def combines(self) -> Literal["elementwise", "linearly"] | None:
        """Elementwise, not linearly: the step size is a vector."""
        return "elementwise" if self.in_step else None
