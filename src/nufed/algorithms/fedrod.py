"""FedRoD: a generic head with a balanced loss, plus a personal head (Chen & Chao, 2022).

The model is a body θ with features z and a linear generic head ψ, together w = (θ, ψ). Every agent
m also has a personal linear head φ_m. With N_c of its training samples in class c, each local step
updates w and φ_m on the same batch, both with gradients at the values before the step:

    balanced softmax:  ℓ_b(y, g) = −log( N_y^γ·exp(g_y) / Σ_c N_c^γ·exp(g_c) ),   g = ψz
    w   ← w − η·∇_w ℓ_b(y, ψz)
    φ_m ← φ_m − η_p·∇_φ ℓ(y, [ψz] + φ_m[z]),   no gradient flows into terms in brackets.

ψ and φ are linear in z, so that ψz + φz = (ψ + φ)z: the personal model is the module whose head is
ψ + φ, and ∇_φ is the head's part of the plain gradient there. A class that an agent lacks (N_c = 0)
drops out of the sum: the logarithm of the smallest positive number is added to its logit in place
of log 0, so that loss and gradient stay finite. γ = 0 is the plain loss, and w is then FedAvg's.

The server holds and broadcasts w, on which the server optimiser acts; the agent keeps φ_m, 0 before
its first round. The global model is w. The personal model is the w that the agent receives with its
φ_m (not the agent's own w after local steps, which is not kept). Further fine-tuning takes plain
steps of φ alone. A newcomer starts at φ = 0 and takes as many steps of φ as a round has. The
optimiser drives both loops, each with its own norm and momentum. Not implemented: the paper's
variant in which a hypernetwork gives φ from class shares.

Known mistakes elsewhere: the authors' repository holds no code. FL-bench trains φ on φz alone and
predicts with it alone instead of with ψz + φz, and lets the personal gradient flow into the body.
FedTED minimises the personal loss with an optimiser that does not hold φ, so that φ never changes.
PFLlib counts classes over a loader that drops its last, incomplete batch: a class may be counted 0
times and appear in training, where log 0 makes the loss infinite. FLGo exponentiates logits before
normalising them, which overflows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakSet

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nufed.algorithms.local_training import LocalTraining, check_classes
from nufed.algorithms.protocol import AgentContext, AgentResult, Cost, Notes, Personal, State
from nufed.errors import InputError
from nufed.meta.fine_tuning import Rate, descend
from nufed.objective import AnyObjective, Batch, Inputs, Objective
from nufed.objective.objective import features_of
from nufed.settings import STEP_SIZES, setting


@dataclass(frozen=True)
class FedRoD(LocalTraining):
    """FedRoD: a shared model with a balanced loss plus a personal head (Chen & Chao, 2022).

    Args:
        balance: γ, the exponent of class counts in the balanced softmax.
        personal_lr: η_p, the step size of φ.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η.
    """

    balance: float = setting(1.0, "γ, exponent of class counts in the balanced loss", least=0)
    personal_lr: float = setting(
        0.001,
        "η_p, step size of the personal head",
        least=0,
        search=STEP_SIZES,
        follows="meta_lr",
    )

    notes: ClassVar[Notes] = Notes(
        newcomer="trains a personal head, from 0, for as many steps as a round has",
        optimized="steps of the shared model and of the personal head",
        shown_steps=0,
        averaging="samples",
    )
    combines: ClassVar[None] = None  # every agent has its own loss

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        base = objective.base
        *others, head = base.layers.values()
        weights = {id(p) for layer in others for p in layer.parameters(recurse=False)}
        tied = any(id(p) in weights for p in head.parameters(recurse=False))
        if not isinstance(head, nn.Linear) or tied:
            raise InputError(
                "fedrod needs a model whose last layer is a torch.nn.Linear with weights of its "
                f"own, and this one ends in {type(head).__name__}: change the model or use "
                "another algorithm"
            )
        return {"personal_head": torch.zeros_like(base.part("head").take(received["model"]))}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        objective = context.objective.base
        w, phi = received["model"], state["personal_head"]
        check_logits(objective, w, context)
        balanced = self.balanced(objective, self.class_counts(context))
        step, personal_step = self.start_steps(context), self.start_steps(context, self.personal_lr)
        for batch in self.local_batches(context):
            by_phi = self.personal_gradient(objective, w, phi, batch)
            w = step(w, balanced.grad(w, batch), batch)
            phi = personal_step(phi, by_phi)
        cost = Cost(2 * self.steps_per_round(context))
        return AgentResult({"model": w}, {"personal_head": phi}, cost)

    def class_counts(self, context: AgentContext) -> Tensor:
        """N_c, how many of the agent's training samples are of each class."""
        targets = context.batches.targets()
        check_classes(targets, "fedrod")
        *_, head = context.objective.base.layers.values()
        assert isinstance(head, nn.Linear)  # as agent_init requires
        return torch.bincount(targets, minlength=head.out_features)

    def balanced(self, objective: Objective, counts: Tensor) -> Objective:
        """The objective with ℓ_b: N_c^γ·exp(g_c) is exp(g_c + γ·log N_c)."""
        logs = torch.xlogy(self.balance, counts.to(objective.dtype))  # γ = 0 counts all classes
        shift = logs.clamp(min=math.log(torch.finfo(objective.dtype).tiny))
        shift = shift.to(objective.initial().device)
        return objective.variant(shift=shift)

    def personal_gradient(
        self, objective: Objective, w: Tensor, phi: Tensor, batch: Batch
    ) -> Tensor:
        """∇_φ of the plain loss of [ψz] + φ[z]."""
        return objective.grad(_joined(objective, w, phi), batch, objective.part("head"))

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        w = received["model"]
        if state is not None:
            return Personal({"model": w, **state})
        phi = self.agent_init(context.objective, received)["personal_head"]
        step = self.start_steps(context, self.personal_lr)
        for batch in self.local_batches(context, "personal"):
            phi = step(phi, self.personal_gradient(context.objective.base, w, phi, batch))
        cost = Cost(self.steps_per_round(context))
        return Personal({"model": w, "personal_head": phi}, cost)

    def fine_tune(
        self, context: AgentContext, received: State, personal: State, steps: int, scale: float = 1
    ) -> Iterator[State]:
        objective, w, phi = context.objective.base, personal["model"], personal["personal_head"]
        rate: Rate = scale * self.rate(objective, received)
        if isinstance(rate, Tensor) and rate.ndim:
            rate = objective.part("head").take(rate)
        yield personal
        for batch in context.batches.draw("adapt", self.batch_size, steps):
            phi = descend(phi, rate, self.personal_gradient(objective, w, phi, batch))
            yield {**personal, "personal_head": phi}

    def predict(self, objective: AnyObjective, personal: State, inputs: Inputs) -> Tensor:
        w = _joined(objective.base, personal["model"], personal["personal_head"])
        return objective.predict(w, inputs)


_CHECKED: WeakSet[Objective] = WeakSet()


def check_logits(objective: Objective, w: Tensor, context: AgentContext) -> None:
    """Refuse models whose outputs are not their head's, and losses that do not normalise them."""
    if objective in _CHECKED:
        return
    one = context.batches.take(np.zeros(1, dtype=np.int64))
    outputs, head = objective.predict(w, one.inputs), objective.part("head").take(w)
    if not outputs.isfinite().all():  # the training diverged, which is named elsewhere
        return
    features, classes = features_of(objective, w, one.inputs), outputs.shape[-1]
    weight = head[: features.shape[-1] * classes].view(classes, -1)
    logits = F.linear(
        features, weight, head[weight.numel() :] if len(head) > weight.numel() else None
    )
    if not torch.allclose(logits, outputs, rtol=1e-3, atol=1e-5):
        raise InputError(
            "fedrod needs a model whose outputs are those of its last linear layer, and this one "
            "changes them: remove what follows that layer, or use another algorithm"
        )
    shift = torch.arange(classes, dtype=outputs.dtype, device=outputs.device)
    plain, shifted = (_by_outputs(objective, z, one.targets) for z in (outputs, outputs + shift))
    if classes > 1 and torch.allclose(plain, shifted):
        raise InputError(
            "fedrod needs a loss that normalises the outputs, such as cross-entropy, and this one "
            "does not (as for log-probabilities): change the loss or use another algorithm"
        )
    _CHECKED.add(objective)


def _by_outputs(objective: Objective, outputs: Tensor, targets: Tensor) -> Tensor:
    leaf = outputs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(objective.loss(leaf, targets), leaf)
    return gradient


def _joined(objective: Objective, w: Tensor, phi: Tensor) -> Tensor:
    """The model whose head is ψ + φ."""
    head = objective.part("head")
    return head.put(w, head.take(w) + phi)
