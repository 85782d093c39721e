"""FedDBE: FedAvg without the agents' biases in representation space (Zhang et al., 2023).

With z(x; w) the inputs of the last layer, agent i keeps a bias b_i, 0 at the start, that is added
to them (the paper's personalised representation bias memory), and the mean of its features is held
near a consensus m̄ (its mean regularisation). Each local step moves y and b_i, from y = w, with both
gradients at the values before the step, along the gradient of

    f_i(y, b_i) + κ·½·mean over features of (m − m̄)²,    f_i(y, b): the head gets z(x; y) + b,
    m ← (1 − μ)·m + μ·mean over the batch of z(x; y),

m of the first batch being its mean; no gradient flows into the m of earlier batches. The first
round is FedAvg's, without bias and regularisation; in it agents send m beside y, and the mean of
these is m̄ from then on. Server: w ← mean of y. Agents send y and keep b_i, which takes effect once
the server has accepted the update. κ = 0 with ``bias_lr`` = 0 is FedAvg.

The global model is w, without a bias. The personal model is w with b_i; further fine-tuning takes
plain steps of w with b_i fixed. A newcomer uses b = 0. The optimiser drives the steps of y and of
b. A local step costs one gradient, by y and b at once. What travels is what travels in FedAvg, and
in the first round m, a mean of features that depends on few samples. Secure aggregation sums it.

The paper takes m̄ from all agents in a phase before training, in which models are thrown away: with
``participation = 1`` it is the first round here, whose models are kept. In the authors' code m
starts at 0 in every round, so that for μ = 0.1 a first m is a tenth of the batch's mean. It uses
one step size for y and b, as here by default, and weights by samples (``averaging = "samples"``).

Known mistakes elsewhere: none was found in public threads. The tests reject likely ones: the sum
over features, or z + b_i in the regulariser; m without earlier batches, or no factor μ in its
gradient; a consensus that follows the agents; a regulariser or a bias step in the first round; a
bias that is lost, or left out of the personal model or of its fine-tuning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import AgentContext, AgentResult, Cost, Notes, Personal, State
from nufed.meta.fine_tuning import descend
from nufed.objective import AnyObjective, Batch, Inputs, Objective
from nufed.objective.objective import differentiated, edited_features, linear_head
from nufed.settings import Search, setting


@dataclass(frozen=True)
class FedDBE(LocalTraining):
    """FedDBE: FedAvg without the agents' biases in representation space (Zhang et al., 2023).

    Args:
        weight: κ, the weight of the mean regularisation.
        mean_momentum: μ, the weight of a batch in the running mean of features.
        bias_lr: the step size of b_i; by default that of the model.
        others: as for :class:`LocalTraining`.
    """

    weight: float = setting(
        1.0, "κ, weight of the mean regularisation", least=0, search=Search(0.1, 100.0)
    )
    mean_momentum: float = setting(
        1.0, "μ, weight of a batch in the running mean of features", above=0, most=1
    )
    bias_lr: float | Literal["meta_lr"] = setting(
        "meta_lr", "step size of the agent's bias; 0: fixed at 0", least=0
    )

    receives: ClassVar[tuple[str, ...]] = ("model", "mean")
    sends: ClassVar[tuple[str, ...]] = ("model", "mean")
    notes: ClassVar[Notes] = Notes(
        newcomer="uses the global model, with bias 0",
        optimized="steps of the model and of the bias",
        shown_steps=0,
        averaging="samples",
    )
    combines: ClassVar[None] = None  # features are of one model at a time

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        return {"model": w, "mean": w.new_zeros(linear_head(objective.base).in_features)}

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        return {"bias": torch.zeros_like(received["mean"])}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        y, b, m = received["model"], state["bias"], None
        first, objective = context.round == 1, context.objective.base
        rate = self.meta_lr if self.bias_lr == "meta_lr" else self.bias_lr
        step, bias_step = self.start_steps(context), self.start_steps(context, rate)
        consensus = None if first else received["mean"]
        for batch in self.local_batches(context):
            by_y, by_b, m = self.gradients(objective, (y, b), batch, m, consensus)
            y = step(y, by_y, batch)
            b = b if first else bias_step(b, by_b)
        assert m is not None
        vectors = {"model": y, "mean": m} if first else {"model": y}
        return AgentResult(vectors, {"bias": b}, Cost(self.steps_per_round(context)))

    def sent_in(self, round: int) -> Sequence[str]:
        return ("model", "mean") if round == 1 else ("model",)

    def gradients(
        self,
        objective: Objective,
        at: tuple[Tensor, Tensor],
        batch: Batch,
        m: Tensor | None,
        consensus: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients by y and b, and the next m; without a consensus there is no regulariser."""
        y, b = (vector.detach().requires_grad_() for vector in at)
        means: list[Tensor] = []

        def shift(z: Tensor) -> Tensor:
            means.append(z.flatten(0, -2).mean(dim=0))
            return z + b

        with torch.enable_grad(), edited_features(objective, shift):
            loss = objective.forward(y, batch)
            m = means[0] if m is None else torch.lerp(m, means[0], self.mean_momentum)
            if consensus is not None:
                loss = loss + self.weight * 0.5 * (m - consensus).square().mean()
        by_y, by_b = differentiated(objective, at[0], loss, (y, b))
        return by_y, by_b, m.detach()

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        state = self.agent_init(context.objective, received) if state is None else state
        return Personal({"model": received["model"], "bias": state["bias"]})

    def fine_tune(
        self, context: AgentContext, received: State, personal: State, steps: int, scale: float = 1
    ) -> Iterator[State]:
        objective, w = context.objective.base, personal["model"]
        rate = scale * self.rate(objective, received)
        yield personal
        for batch in context.batches.draw("adapt", self.batch_size, steps):
            with edited_features(objective, lambda z: z + personal["bias"]):
                after = descend(w, rate, objective.grad(w, batch))
                w = objective.track(after, batch, at=w)
            yield {**personal, "model": w}

    def predict(self, objective: AnyObjective, personal: State, inputs: Inputs) -> Tensor:
        with edited_features(objective.base, lambda z: z + personal["bias"]):
            return objective.base.predict(personal["model"], inputs)
