"""Gradient steps in a flat vector itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from nufed.objective.batch import AnyBatch, Batch
from nufed.objective.flat_loss import FlatLoss
from nufed.objective.modules import call_arguments, holding
from nufed.objective.parts import Part

Pull: TypeAlias = tuple[float, Tensor]
"""Weight λ and centre c of a proximal term λ/2‖w − c‖²."""


class LocalSteps(FlatLoss):
    """Plain gradient steps, with the bits of ``w - lr * grad(w, batch)``, but in place."""

    @torch.no_grad()
    def descend(
        self,
        w: Tensor,
        batches: Iterable[AnyBatch],
        lr: float,
        part: Part | None = None,
        pull: Pull | None = None,
    ) -> None:
        """One step per batch in w itself: w ← w − lr·(∇f(w, batch) + λ(w − c)).

        There is no vector of the gradient where it comes tensor by tensor. Running statistics that
        the objective tracks are updated, too.

        Args:
            w: one vector, which is overwritten.
            batches: of the gradients.
            lr: the step size.
            part: the coordinates that are changed, all by default; whole tensors.
            pull: λ and c; no proximal term by default.
        """
        self._check_vector(w)
        wanted = self._touched(part)
        if not wanted:
            return
        if self._chain is None or not (part is None or part.contiguous):
            self._tensor_steps(w, batches, lr, wanted, pull)
            return
        index = slice(None) if part is None else part.index
        for batch in (Batch(*each) for each in batches):
            if not self._in_closed_form(batch):
                self._tensor_steps(w, [batch], lr, wanted, pull)
                continue
            gradient, _ = self._grad(w, batch, wanted)
            own = w[index]
            if pull:
                own.lerp_(pull[1][index], lr * pull[0])
            own.sub_(gradient, alpha=lr)

    def _tensor_steps(
        self,
        w: Tensor,
        batches: Iterable[AnyBatch],
        lr: float,
        wanted: Sequence[int],
        pull: Pull | None,
    ) -> None:
        """The same steps with gradients of autograd; the module holds the tensors of w."""
        facts = self._facts()
        views = self._views(w.detach())
        leaves = [views[i].requires_grad_() for i in wanted]
        tensors = [leaf.detach() for leaf in leaves]
        centres = [self._views(pull[1])[i] for i in wanted] if pull else []
        # apart from w, since layers change them in a pass whose backward pass needs w unchanged
        statistics = {name: views[i].detach().clone() for name, i in self._statistics.items()}
        held = {name: views[i] for name, i in self._names.items()} | statistics | facts.counters
        with holding(facts.slots, held):
            for batch in (Batch(*each) for each in batches):
                arguments, keywords = call_arguments(batch.inputs, self._like)
                with self._mode(batch.seed), torch.enable_grad():
                    loss = self.loss(self._module(*arguments, **keywords), batch.targets)
                gradients = self._by(leaves, loss)
                if pull:
                    torch._foreach_lerp_(tensors, centres, lr * pull[0])
                torch._foreach_sub_(tensors, gradients, alpha=lr)
        for name, i in self._statistics.items():
            if i in wanted:
                views[i].detach().copy_(statistics[name])
