"""LG-FedAvg: local representations, a global head (Liang et al., 2020).

FedPer with the parts exchanged. With θ^ℓ_i the lower layers of agent i, which start from the
initial model, and θ^g the upper ones,

    agent:   τ times:  (θ^ℓ_i, θ^g) ← (θ^ℓ_i, θ^g) − η∇f_i(θ^ℓ_i, θ^g)   both together
    server:  θ^g ← mean of the agents' θ^g.

The server holds and broadcasts θ^g; θ^ℓ_i stays with the agent and is never sent. The personal
model is (θ^ℓ_i, θ^g) with the server's latest θ^g. A newcomer trains the initial lower layers for a
round's local steps with θ^g fixed (in the paper a new device uses an ensemble of all agents' models
instead, which would disclose their private parts). ``optimizer`` drives all of these steps. The
paper's auxiliary losses on representations are not implemented.

Known mistakes elsewhere: the authors' script selects, for each agent, the round whose local model
has the best accuracy on the *test* samples and reports that; it also starts from a model that
FedAvg trained for many rounds, a cost that its curves do not show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from nufed.algorithms.partial import PRIVATE, PrivatePart
from nufed.algorithms.protocol import Notes
from nufed.settings import setting


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(PrivatePart):
    """LG-FedAvg: a shared head on a private body, trained together (Liang et al., 2020).

    Args:
        private: θ^ℓ, the local layers.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η, ``local_steps`` τ.
    """

    private: str = setting("body", PRIVATE)

    notes: ClassVar[Notes] = replace(PrivatePart.notes, averaging="samples")
