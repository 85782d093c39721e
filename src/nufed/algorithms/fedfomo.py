"""FedFomo: agents try others' models on their own samples and mix them (Zhang et al., 2021).

Agent i receives M models of others. With θ the model from which its last local training started,
θ_n the received ones and the one that this training led to, and L the loss on samples that it holds
out of its training part,

    w_n = max(0, L(θ) − L(θ_n)) / ‖θ_n − θ‖,   divided by their sum,
    θ ← θ + Σ_n w_n (θ_n − θ),   then τ steps of θ_i ← θ_i − β∇f_i(θ_i) from θ_i = θ:

a first-order approximation of the best mixture. Where no model is better, θ stays, and its last
training is undone. The held-out samples are a share of the training part, evenly spaced in it and
the same in all rounds; no step uses them, and neither validation nor test samples are seen.

The server keeps each agent's last θ_i, and how much each has valued the others: the sums P_in of
the w_n that i has sent. For each of the M places it takes the model with the largest P_in that is
left, equal ones in random order; with probability ε_k = max(0, ε − decay·k), in round k, any.
Places for which there is no other model are zeros, marked as unknown, and are not tried; so is no
model equal to θ, whose gain would be rounding over 0. The agent sends θ_i and its weights w_n, the
last of which is its own share. The personal model is θ_i. A newcomer
mixes M models, with the initial one as θ, and takes one round's steps. There is no global model,
and none to bundle.

Server and checkpoints hold one model and one row of P for each agent heard of; M models travel to
an agent per round and evaluation. A round costs it τ gradients, and M + 2 losses on the held-out
samples, which are not counted. The optimiser drives the local steps.

Privacy: an agent gets M models of single others as they are, and can attack each like a server
could; whose they are it is not told. The server sees all models and who values whom. Secure
aggregation and [privacy] are refused.

The authors' code takes this θ in its published commands (``--baseline_model first_model``), with
five local epochs per round. There distances are ℓ1 norms by default, P also sums negative gains,
only agents of the last round are available, and averages of models may be candidates.
Known mistakes elsewhere: P sorted in ascending order, so that the least valued models are sent
([FLGo](https://github.com/WwZzz/easyFL/blob/FLGo/resources/algorithm/fedfomo.py)); only models of
the last cohort, under wrong indices ([PFLlib #52](https://github.com/TsingZ0/PFLlib/issues/52),
corrected there); L(θ) replaced by the mean loss of the training batches while θ moved, and these
batches used in place of held-out samples (an earlier PFLlib). The tests also reject: weights that
are not divided by the distance, not normalised or negative; the agent's own model left out, or
counted once more for every missing one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nufed.algorithms.agent_rows import AGENTS, no_rows, row_of, with_rows
from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    Context,
    Cost,
    Draw,
    Notes,
    Personal,
    Places,
    State,
    Updates,
)
from nufed.objective import AnyObjective, Batch
from nufed.seeding import stream, torch_seed
from nufed.settings import setting


@dataclass(frozen=True)
class FedFomo(LocalTraining):
    """FedFomo: agents mix others' models by their loss on held-out samples (Zhang et al., 2021).

    Args:
        models: M, how many models of others an agent receives.
        held_out: the share of its training samples on which an agent tries them.
        exploration: ε, the probability of a random model in place of the most valued.
        exploration_decay: what ε loses per round.
        others: as for :class:`LocalTraining`.
    """

    models: int = setting(5, "M, models of others that an agent receives", least=1)
    held_out: float = setting(
        0.2, "share of training samples on which models are tried", above=0, below=1
    )
    exploration: float = setting(0.3, "ε, probability of a random model", least=0, most=1)
    exploration_decay: float = setting(0.05, "decrease of ε per round", least=0)

    receives: ClassVar[tuple[str, ...]] = ()
    sends: ClassVar[tuple[str, ...]] = ("model", "weights")
    combines: ClassVar[None] = None  # agents hold out different numbers of samples
    notes: ClassVar[Notes] = Notes(
        newcomer="mixes models of others by its own samples and takes one round's steps",
        optimized="the local steps",
        shown_steps=0,
    )

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        tables = {**no_rows(models=w), "affinity": w.new_empty(0, 0)}
        return {"model": w, "weights": w.new_zeros(self.models + 1), **tables}

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        w = objective.base.initial()
        return {"start": w, "local": w}

    def downlink(self, context: Context, server: State, agent: int | None) -> State:
        others = server["models"][self.picked(context, server, agent)]
        missing = self.models - len(others)
        known = F.pad(others.new_ones(len(others)), (0, missing))
        return {"models": F.pad(others, (0, 0, 0, missing)), "known": known}

    def picked(self, context: Context, server: State, agent: int | None) -> list[int]:
        """The rows of the models that this agent is sent."""
        row, number = row_of(server, agent), len(server[AGENTS])
        rng = stream(context.seed, "fedfomo/models", context.round, agent or 0)
        shuffled = [int(r) for r in rng.permutation(number) if r != row]
        values = [0.0] * number if row is None else server["affinity"][row].tolist()
        best = sorted(shuffled, key=lambda r: -values[r])
        explored = self.exploration - self.exploration_decay * context.round
        explores = rng.random(self.models) < (explored if context.round else 0)
        rows: list[int] = []
        for explore in explores[: len(shuffled)]:
            rows.append(next(r for r in (shuffled if explore else best) if r not in rows))
        return rows

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        start, weights = self.mixed(context, received, state)
        local = self.descend(context, start)
        sent = {"model": local, "weights": weights}
        cost = Cost(self.steps_per_round(context))
        return AgentResult(sent, {"start": start, "local": local}, cost)

    def mixed(self, context: AgentContext, received: State, state: State) -> tuple[Tensor, Tensor]:
        """The next θ; the weights of the received models, then the rest up to 1."""
        objective, before = context.objective.base, state["start"]
        held = context.batches.take(self.parts(context)[1])
        models = torch.cat([received["models"], state["local"].unsqueeze(0)])
        known = torch.cat([received["known"], received["known"].new_ones(1)])
        loss = objective.value(before, held)
        gains = torch.stack([loss - objective.value(w, held) for w in models]).to(before)
        distances = torch.stack([objective.norm(w - before) for w in models]).to(before)
        better = (gains > 0) & (distances > 0) & (known > 0)
        weights = torch.where(better, gains / distances, 0.0)
        if weights.any():
            weights = weights / weights.sum()
        others = weights[:-1]
        return before + weights @ (models - before), torch.cat([others, 1 - others.sum(0, True)])

    def parts(self, context: AgentContext) -> tuple[Places, Places]:
        """The places of samples to train on, and of those held out; a single sample is both."""
        number = len(context.batches.targets())
        if number == 1:
            return np.zeros(1, np.int64), np.zeros(1, np.int64)
        count = min(max(1, round(self.held_out * number)), number - 1)
        held = np.linspace(0, number - 1, count).round().astype(np.int64)
        return np.setdiff1d(np.arange(number), held), held

    def local_batches(self, context: AgentContext, purpose: str = "outer") -> Iterator[Batch]:
        places, _ = self.parts(context)
        size = min(self.batch_size, len(places))
        for t in range(self.local_epochs or self.local_steps):
            rng = context.batches.stream(purpose, t)
            order = rng.permutation(places)
            for first in range(0, len(order) if self.local_epochs else 1, size):
                yield context.batches.take(order[first : first + size], torch_seed(rng))

    def steps_per_round(self, context: AgentContext) -> int:
        places, _ = self.parts(context)
        batches = -(-len(places) // min(self.batch_size, len(places)))
        return self.local_epochs * batches or self.local_steps

    def server_update(self, context: Context, server: State, updates: Updates) -> State:
        mean = self.aggregate(context, updates, "model", server["model"])
        after = with_rows(server, {u.agent: {"models": u.vectors["model"]} for u in updates})
        agents, known = after[AGENTS], server[AGENTS]
        affinity = mean.new_zeros(len(agents), len(agents))
        moved = torch.searchsorted(agents, known)
        affinity[moved.unsqueeze(1), moved] = server["affinity"]
        for update in updates:
            of = torch.searchsorted(agents, known[self.picked(context, server, update.agent)])
            affinity[row_of(after, update.agent), of] += update.vectors["weights"][: len(of)]
        return {**after, "model": mean, "affinity": affinity}

    def global_model(self, objective: AnyObjective, received: State) -> None:
        return None

    def personal_model(
        self, context: AgentContext, received: State, state: State | None
    ) -> Personal:
        if state is not None:
            return Personal({"model": state["local"]})
        start, _ = self.mixed(context, received, self.agent_init(context.objective, received))
        return Personal(
            {"model": self.descend(context, start)}, Cost(self.steps_per_round(context))
        )

    def update_draws(self) -> list[Draw]:
        return []
