"""FedRep: a shared representation, updated after each agent fits its head (Collins et al., 2021).

With φ the representation and h_i the head of agent i, which starts from the initial model,

    agent:   τ_h times:  h_i ← h_i − α∇_h f_i(h_i, φ)      φ as received
             τ times:    φ_i ← φ_i − α∇_φ f_i(h_i, φ_i)    with the new head fixed
    server:  φ ← mean of the agents' φ_i.

The server holds and broadcasts φ; h_i stays with the agent and is never sent. The personal model is
(φ, h_i) with the server's latest φ. A newcomer fits the initial head with φ fixed, in τ_h steps.
``optimizer`` drives both loops, each with its own momentum; the fixed part does not change by a
bit. Both loops use the round's batches from the first on, as in the paper's analysis, where the
head and the representation are updated on the same samples.

Known mistakes elsewhere: one optimiser with momentum and weight decay holds both parts, of which
one is frozen by ``requires_grad = False`` alone, so that whether it stays fixed depends on how
gradients are cleared, and momentum carries over to the next round (code derived from the authors',
which also trains all heads once more before the last evaluation); both parts trained in the second
loop (a derivative of that code).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nufed.algorithms.local_training import Gradient
from nufed.algorithms.partial import PrivatePart
from nufed.algorithms.protocol import AgentContext, Cost, Draw, Notes
from nufed.objective import Batch
from nufed.settings import setting


@dataclass(frozen=True, kw_only=True)
class FedRep(PrivatePart):
    """FedRep: the private head is fitted first, then the shared body moves (Collins et al., 2021).

    Args:
        private: h, the head.
        head_steps: τ_h (their τ), steps of the head.
        others: as for :class:`LocalTraining`; ``meta_lr`` is α, and ``local_steps`` or
            ``local_epochs`` count steps of the representation.
    """

    head_steps: int = setting(10, "τ_h, steps of the private part, taken first", least=1)

    notes: ClassVar[Notes] = Notes(
        newcomer="takes head_steps steps of the initial private part",
        optimized="steps of the head and of the body",
        shown_steps=0,
    )

    def train(
        self, context: AgentContext, w: Tensor, gradient: Gradient | None = None
    ) -> tuple[Tensor, Cost]:
        """The agent's model after a round; ``gradient`` is that of the body, ∇f by default."""
        private, shared = self.parts(context.objective)
        tau, tau_h = self.steps_per_round(context), self.head_steps
        batches = list(context.draw_each(self.step_draws(steps=max(tau, tau_h))))
        of_body = self.local_batches(context) if self.local_epochs else iter(batches[:tau])
        w = self.descend(context, w, part=private, batches=batches[:tau_h])
        w = self.descend(context, w, gradient, part=shared, batches=of_body)
        return w, Cost(tau_h + tau)

    def newcomer_batches(self, context: AgentContext) -> Iterator[Batch]:
        return context.draw_each(self.step_draws("personal", self.head_steps))

    def update_draws(self) -> list[Draw]:
        steps = max(self.head_steps, self.local_steps)
        return [] if self.local_epochs else self.step_draws(steps=steps)

    def personal_draws(self, steps: int) -> list[Draw]:
        head_draws = self.step_draws("personal", self.head_steps)
        return [Draw("adapt", self.batch_size, steps), *head_draws]
