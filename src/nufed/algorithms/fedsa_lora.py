"""FedSA-LoRA: the matrices A of low-rank adapters are averaged, B is private (Guo et al., 2024).

FedPer on adapters. A layer with an adapter is W + (alpha / rank)·B·A with W frozen. They found that
A learns what agents have in common, and B what is an agent's own. With A the matrices A and all
else that is trained (the head), and B_i those of agent i, which start at 0,

    agent:   τ times:  (A, B_i) ← (A, B_i) − η∇f_i(A, B_i)   both together
    server:  A ← mean of the agents' A.

The server holds and broadcasts A; B_i stays with the agent and is never sent. The personal model is
(A, B_i) with the server's latest A. A newcomer trains B from 0 for a round's local steps with A
fixed. ``private = "*lora_B*, head"`` keeps the head with the agent, too, as labels of its own need.
``optimizer`` drives all of these steps. It is for ``model.train = "lora"``; without adapters it is
FedAvg. FFA-LoRA, which averages B and never trains A, is a setting of the model:
``model.lora.freeze_a`` with FedAvg.

Known mistakes elsewhere: averaging A and B separately, as FedAvg on adapters does, is not the
average of the products B·A.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from nufed.algorithms.partial import PRIVATE, PrivatePart, divide
from nufed.objective import AnyObjective
from nufed.objective.parts import Part
from nufed.settings import setting

MATRICES_B = "*lora_B*"  # as peft calls them


@dataclass(frozen=True, kw_only=True)
class FedSALoRA(PrivatePart):
    """FedSA-LoRA: matrices A of adapters are shared, B is private (Guo et al., 2024).

    Args:
        private: the matrices B.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η, ``local_steps`` τ.
    """

    private: str = setting(MATRICES_B, PRIVATE)

    def parts(self, objective: AnyObjective) -> tuple[Part, Part]:
        names = objective.base.names
        adapted = any(fnmatchcase(name, MATRICES_B) for name in names)
        absent = self.private == MATRICES_B and not adapted
        return divide(objective.base, "none" if absent else self.private)
