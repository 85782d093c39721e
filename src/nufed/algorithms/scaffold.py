"""SCAFFOLD: control variates correct the drift of local steps (Karimireddy et al., 2020).

With the server's control variate c and the agent's c_i, both 0 at the start,

    y ← x;  τ times:  y ← y − η(∇f_i(y) − c_i + c)
    c_i⁺ = c_i − c + (x − y)/(τη)                                  (their option II)
    x ← x + η_g·mean(y − x),   c ← c + (1/N) Σ_{i in cohort} (c_i⁺ − c_i).

The agent keeps c_i. c_i⁺ replaces it once the server has accepted the update, so that c stays the
mean of all c_i under partial participation and rejected updates. τ is the agent's own number of
steps and η the step size of the round. With momentum, weight decay or clipping, c_i⁺ is the mean of
the raw gradients ∇f_i(y), which the formula gives for plain steps; so it is with running
statistics of BatchNorm, which are averaged as part of the model and have no control variate.

Known mistakes elsewhere: c_i is never stored, so that it stays 0 (the server of FL-bench). The
tests also reject: c updated by the mean over the cohort, or not at all; τ missing from c_i⁺; the
wrong sign, or no correction; a server step without η_g.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nufed.algorithms.aggregation import Mean
from nufed.algorithms.local_optimizer import Memory
from nufed.algorithms.local_training import LocalTraining
from nufed.algorithms.protocol import (
    AgentContext,
    AgentResult,
    Context,
    Cost,
    Notes,
    State,
    Updates,
)
from nufed.objective import AnyObjective, Batch
from nufed.settings import STEP_SIZES, Search, setting


@dataclass(frozen=True, kw_only=True)
class Scaffold(LocalTraining):
    """SCAFFOLD: control variates (option II) correct the drift of local steps.

    Args:
        server_lr: η_g, the server's step size.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η, ``local_steps`` is τ (their K), and
            control variates are always averaged.
    """

    meta_lr: float = setting(
        0.001, "η, step size of a local step", above=0, search=STEP_SIZES, of_longest_step=0.5
    )
    server_lr: float = setting(
        1.0, "η_g, step size of the server", above=0, search=Search(0.1, 3.0)
    )

    receives: ClassVar[tuple[str, ...]] = ("model", "control")
    sends: ClassVar[tuple[str, ...]] = ("model", "control")
    kept_loops: ClassVar[tuple[str, ...]] = ("local",)
    notes: ClassVar[Notes] = Notes(
        newcomer="fine-tunes the global model; it has no control variate",
        lost_state="the server's control variate is no longer the mean of the agents', which "
        "biases all later rounds; start a new run to remove the bias",
        optimized="the local steps",
    )

    def server_init(self, objective: AnyObjective, w: Tensor) -> State:
        return {"model": w, "control": torch.zeros_like(w)}

    def agent_init(self, objective: AnyObjective, received: State) -> State:
        kept = super().agent_init(objective, received)
        return {**kept, "control": torch.zeros_like(received["model"])}

    def agent_update(self, context: AgentContext, received: State, state: State) -> AgentResult:
        x, c, c_i = received["model"], received["control"], state["control"]
        state = {**state}
        total, shift = torch.zeros_like(x), c - c_i  # total: the sum of ∇f_i over steps

        def corrected(y: Tensor, batch: Batch) -> Tensor:
            nonlocal total
            g = context.objective.grad(y, batch)
            total = total + g
            return g + shift

        y = self.descend(context, x, corrected, memory=Memory(state))
        steps = self.steps_per_round(context)
        state["control"] = new = total / steps  # c_i − c + (x − y)/(τη) of plain steps
        # sent is the server's vector plus the agent's change: c + (new − c_i)
        vectors = {"model": y, "control": c + (new - c_i)}
        return AgentResult(vectors, state, Cost(steps))

    def server_update(self, context: Context, server: State, updates: Updates) -> State:
        x, c = server["model"], server["control"]
        y = self.aggregate(context, updates, "model", x)
        change = Mean().combine(updates, "control", c) - c
        return {
            "model": (y - x).mul_(self.server_lr).add_(x),
            "control": change.mul_(len(updates) / context.agents).add_(c),
        }
