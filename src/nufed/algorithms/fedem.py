"""FedEM: every agent's data are a mixture of k shared components, by EM (Marfoq et al., 2021).

Component m has parameters θ_m and p_m(y|x) = c·exp(−ℓ(h_θm(x), y)); agent i mixes them with weights
π_i. In a round, for every sample z of the agent, with the θ and π_i from before the round,

    E-step:  q_z(m) = π_im·exp(−ℓ_m(z)) / Σ_m' π_im'·exp(−ℓ_m'(z))           (Bayes' rule)
    M-step:  π_i ← mean of q_z over the training part,
             θ̃_im: τ local steps of  θ ← θ − η·(1/D)Σ_z q_z(m)·∇ℓ_m(z)       from θ_m
    server:  θ_m ← mean of θ̃_im.

q stays fixed during the local steps. ℓ is a sample's loss, in evaluation mode in the E-step. For
cross-entropy p_m is the model's own probability; for squared errors it is a normal distribution of
variance 1/2, so that the scale of targets matters.

The server holds and broadcasts θ_1 … θ_k; an agent keeps π_i, which tells what its data are like
and is never sent, and sends k models. A round costs k times FedAvg's gradients, and the losses of
the E-step, which are not counted. The personal model predicts with the received components and π_i:
Σ_m π_im·softmax(h_θm(x)) for classes, whose logarithm it returns, and Σ_m π_im·h_θm(x) for numbers.
Fine-tuning takes steps of −log Σ_m π_im·p_m by θ, with π_i fixed. A newcomer finds π_i by
``newcomer_steps`` E-steps on its training part, from equal weights. There is no global model, so
that only personal models can be bundled. ``optimizer`` drives the local steps of every component,
each with its own memory.

The authors' code agrees, but for passes over the data in place of single local steps; a new client
takes one E-step per evaluation.

Known mistakes elsewhere: no public thread was found. The tests reject: an E-step without π; q from
the components of the local steps; gradients divided by Σ_z q_z(m); hard assignments; π from the
last batch; a mean of logits in place of probabilities; a newcomer with equal weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from nufed.algorithms.protocol import AgentContext, AgentResult, Cost, Notes, Personal, State
from nufed.algorithms.several_models import SeveralModels
from nufed.meta.fine_tuning import descend
from nufed.objective import AnyObjective, Batch, Inputs, Objective
from nufed.settings import setting


@dataclass(frozen=True, kw_only=True)
class FedEM(SeveralModels):
    """FedEM: every agent mixes k shared components with weights of its own (Marfoq et al., 2021).

    Args:
        models: k, the number of components.
        newcomer_steps: E-steps by which a newcomer finds its weights.
        others: as for :class:`SeveralModels`; ``meta_lr`` is η.
    """

    models: int = setting(3, "k, components that agents mix", least=1)
    newcomer_steps: int = setting(10, "E-steps by which a newcomer finds its weights", least=1)

    notes: ClassVar[Notes] = Notes(
        newcomer="finds its weights of the components by E-steps on its training samples",
        lost_state="its weights of the components start equal again",
        optimized="the local steps of every component",
        shown_steps=0,
        averaging="samples",
    )

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        return {"mixture": received["models"].new_full((self.models,), 1 / self.models)}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        objective, pi = context.objective.base, state["mixture"]
        start = self.split(received["models"])
        models, steps = list(start), [self.start_steps(context) for _ in start]
        for batch in self.local_batches(context):
            shares = responsibilities(objective, start, pi, batch)
            for m, step in enumerate(steps):
                models[m] = step(models[m], weighted(objective, shares[m]).grad(models[m], batch))
        q = responsibilities(objective, start, pi, context.batches.whole())
        cost = Cost(self.models * self.steps_per_round(context))
        return AgentResult({"models": torch.cat(models)}, {"mixture": q.mean(dim=1)}, cost)

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        models, samples = self.split(received["models"]), context.batches.whole()
        pi = (state or self.agent_init(context.objective, received))["mixture"]
        for _ in range(0 if state else self.newcomer_steps):
            pi = responsibilities(context.objective.base, models, pi, samples).mean(dim=1)
        classes = not samples.targets.is_floating_point()
        more = {"models": received["models"], "classes": torch.tensor([classes])}
        return Personal({"model": models[int(pi.argmax())], "mixture": pi, **more})

    def fine_tune(
        self, context: AgentContext, received: State, personal: State, steps: int, scale: float = 1
    ) -> Iterator[State]:
        objective, pi = context.objective.base, personal["mixture"]
        rate, models = scale * self.rate(objective, received), self.split(personal["models"])
        yield personal
        for batch in context.batches.draw("adapt", self.batch_size, steps):
            shares = responsibilities(objective, models, pi, batch)
            models = [
                descend(w, rate, weighted(objective, q).grad(w, batch))
                for w, q in zip(models, shares, strict=True)
            ]
            yield {**personal, "model": models[int(pi.argmax())], "models": torch.cat(models)}

    def predict(self, objective: AnyObjective, personal: State, inputs: Inputs) -> Tensor:
        models, pi = self.split(personal["models"]), personal["mixture"]
        outputs = torch.stack([objective.predict(w, inputs) for w in models], dim=-1)
        if personal["classes"]:
            return (pi.log() + outputs.log_softmax(dim=1)).logsumexp(dim=-1)
        return (pi * outputs).sum(dim=-1)


def sample_losses(objective: Objective, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sample."""
    losses: Tensor = vmap(objective.loss)(outputs.unsqueeze(1), targets.unsqueeze(1))
    return losses


def responsibilities(
    objective: Objective, models: Sequence[Tensor], pi: Tensor, samples: Batch
) -> Tensor:
    """q, a row per component and a column per sample."""
    losses = [
        sample_losses(objective, objective.predict(w, samples.inputs), samples.targets)
        for w in models
    ]
    return (pi.log().unsqueeze(1) - torch.stack(losses)).softmax(dim=0)


def weighted(objective: Objective, weights: Tensor) -> Objective:
    """The objective whose loss is the mean of samples' losses times these weights."""
    return objective.variant(
        loss=lambda outputs, targets: (weights * sample_losses(objective, outputs, targets)).mean()
    )
