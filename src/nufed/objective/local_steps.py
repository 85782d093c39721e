"""Gradient steps in a flat vector itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor

from nufed.objective.batch import AnyBatch, Batch
from nufed.objective.flat_loss import FlatLoss, differentiable
from nufed.objective.layered_net import LayeredNet, LayeredPlan
from nufed.objective.loss_gradient import loss_gradient
from nufed.objective.modules import call_arguments, cast_like, holding
from nufed.objective.parts import Part
from nufed.objective.perceptron import Parameters
from nufed.objective.single_gradient import SingleGradient

Pull: TypeAlias = tuple[float, Tensor]
"""Weight λ and centre c of a proximal term λ/2‖w − c‖²."""


class LocalSteps(FlatLoss):
    """Plain gradient steps, with the bits of ``w - lr * grad(w, batch)``, but in place.

    With a shift they have these bits to rounding: in perceptrons, the step of a matrix is one
    operation with the product that is its gradient.
    """

    @torch.no_grad()
    def descend(
        self,
        w: Tensor,
        batches: Iterable[AnyBatch],
        lr: float,
        part: Part | None = None,
        pull: Pull | None = None,
        shift: Tensor | None = None,
    ) -> None:
        """One step per batch in w itself: w ← w − lr·(∇f(w, batch) + λ(w − c) + shift).

        There is no vector of the gradient where it comes tensor by tensor. Running statistics that
        the objective tracks are updated, too.

        Args:
            w: one vector, which is overwritten.
            batches: of the gradients.
            lr: the step size.
            part: the coordinates that are changed, all by default; whole tensors.
            pull: λ and c; no proximal term by default.
            shift: a vector that is added to the gradient; none by default.
        """
        self._check_vector(w)
        wanted = self._touched(part)
        if not wanted:
            return
        if self._chain is None and part is None and self._plan is not None:
            self._layered_steps(self._plan, w, batches, lr, pull, shift)
            return
        if self._chain is None or not (part is None or part.contiguous):
            self._tensor_steps(w, batches, lr, wanted, pull, shift)
            return
        if part is None and pull is None and shift is not None:
            self._shifted_steps(w, batches, lr, shift)
            return
        index = slice(None) if part is None else part.index
        own, centre = w[index], pull[1][index] if pull else None
        shift_of = None if shift is None else shift[index]
        gradient = torch.empty_like(own)  # one for all steps: allocation is slow
        differentiate = self._closed_form(self._unflatten(w.detach()), self._some(gradient, wanted))
        for batch in (Batch(*each) for each in batches):
            if not self._in_closed_form(batch):
                self._tensor_steps(w, [batch], lr, wanted, pull, shift)
                continue
            differentiate(batch)
            if shift_of is not None:
                gradient.add_(shift_of)
            if pull and centre is not None:
                own.lerp_(centre, lr * pull[0])
            own.sub_(gradient, alpha=lr)

    def _shifted_steps(
        self, w: Tensor, batches: Iterable[AnyBatch], lr: float, shift: Tensor
    ) -> None:
        """The same steps of a perceptron with a shift, without a buffer for the gradient."""
        assert self._chain is not None
        p = self._unflatten(w.detach())
        step = SingleGradient(self._chain, p, p).step
        for batch in (Batch(*each) for each in batches):
            if not self._in_closed_form(batch):
                self._tensor_steps(w, [batch], lr, range(len(self._sizes)), None, shift)
                continue
            step(*self._as_tensors(batch), lr)
            w.sub_(shift, alpha=lr)

    def _tensor_steps(
        self,
        w: Tensor,
        batches: Iterable[AnyBatch],
        lr: float,
        wanted: Sequence[int],
        pull: Pull | None,
        shift: Tensor | None,
    ) -> None:
        """The same steps with gradients of autograd; the module holds the tensors of w."""
        facts = self._facts()
        views = self._views(w.detach())
        trained = [i for i in wanted if i < len(self._sizes) - len(self._statistics)]
        leaves = [views[i].requires_grad_() for i in trained]
        tensors = [leaf.detach() for leaf in leaves]
        centres = [self._views(pull[1])[i] for i in trained] if pull else []
        shifts = [self._views(shift)[i] for i in trained] if shift is not None else []
        # apart from w, since layers change them in a pass whose backward pass needs w unchanged
        statistics = {name: views[i].detach().clone() for name, i in self._statistics.items()}
        held = {name: views[i] for name, i in self._names.items()} | statistics | facts.counters
        with holding(facts.slots, held), torch.enable_grad():
            for batch in (Batch(*each) for each in batches):
                arguments, keywords = call_arguments(batch.inputs, self._like)
                with self._mode(batch.seed):
                    loss = self.loss(self._module(*arguments, **keywords), batch.targets)
                if not trained:
                    continue
                _step(tensors, self._by(leaves, loss), lr, pull and pull[0], centres, shifts)
        for name, i in self._statistics.items():
            if i in wanted:
                views[i].detach().copy_(statistics[name])

    def _layered_steps(
        self,
        plan: LayeredPlan,
        w: Tensor,
        batches: Iterable[AnyBatch],
        lr: float,
        pull: Pull | None,
        shift: Tensor | None,
    ) -> None:
        """The same steps with the passes of a layered network, which update its statistics in w."""
        net = LayeredNet(plan, self._unflatten(w.detach()))
        trained = net.trained
        centres = LayeredNet(plan, self._unflatten(pull[1])).trained if pull else []
        shifts = LayeredNet(plan, self._unflatten(shift)).trained if shift is not None else []
        for batch in (Batch(*each) for each in batches):
            if not plan.takes(batch):
                self._tensor_steps(w, [batch], lr, range(len(self._sizes)), pull, shift)
                continue
            self._pass(net, batch)
            _step(trained, net.gradients, lr, pull and pull[0], centres, shifts)

    @torch.no_grad()
    def descend_tensors(self, p: Parameters, batches: Iterable[AnyBatch], lr: float) -> None:
        """One step per batch of tensors that need not be in one vector, by name, in place.

        To rounding it is :meth:`descend` of the vector that they would make: where the module is a
        layered network, steps of matrices are one operation with the products of their gradients.
        """
        net = LayeredNet(self._plan, p, lr) if self._plan else None
        trained = net.trained if net else []
        for batch in (Batch(*each) for each in batches):
            if net is not None and self._plan is not None and self._plan.takes(batch):
                self._pass(net, batch)
                _step(trained, net.gradients, lr, None, [], [])
                continue
            w = torch.cat([p[name].flatten() for name in self._names])
            self.descend(w, [batch], lr)
            for name, after in self._unflatten(w).items():
                p[name].copy_(after)

    def _pass(self, net: LayeredNet, batch: Batch) -> None:
        """Let a network have its gradients on a batch."""
        outputs = net.forward(cast_like(cast(Tensor, batch.inputs), self._like))
        net.backward(self._by_outputs(outputs, batch))

    def _by_outputs(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The derivative of the loss by the module's outputs."""
        targets = cast_like(batch.targets, self._like)
        d = loss_gradient(self._loss_function, outputs, targets)
        if d is None:
            with torch.enable_grad(), self._mode(batch.seed):
                loss = differentiable(self.loss(outputs.requires_grad_(), targets))
            (d,) = torch.autograd.grad(loss, [outputs], materialize_grads=True)
        return d


def _step(
    tensors: list[Tensor],
    gradients: Sequence[Tensor],
    lr: float,
    weight: float | None,
    centres: list[Tensor],
    shifts: list[Tensor],
) -> None:
    """One step of the tensors, with a proximal term of this weight and a shift if there are any."""
    if shifts:
        gradients = torch._foreach_add(list(gradients), shifts)
    if weight is not None:
        torch._foreach_lerp_(tensors, centres, lr * weight)
    torch._foreach_sub_(tensors, list(gradients), alpha=lr)
