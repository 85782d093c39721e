"""FedPer: base layers are averaged, personalisation layers are private (Arivazhagan et al., 2019).

With W_B the base layers and W_{P_i} the personalisation layers of agent i, which start from the
initial model,

    agent:   τ times:  (W_B, W_{P_i}) ← (W_B, W_{P_i}) − η∇f_i(W_B, W_{P_i})   both together
    server:  W_B ← mean of the agents' W_B.

The server holds and broadcasts W_B; W_{P_i} stays with the agent and is never sent. The personal
model is (W_B, W_{P_i}) with the server's latest W_B and the W_{P_i} of the last round in which the
agent took part. A newcomer trains the initial personalisation layers for a round's local steps with
W_B fixed. ``optimizer`` drives all of these steps. ``private = "last:2"`` makes two layers personal
(their K_P = 2).

Known mistakes elsewhere: copying the body by ``parameters()`` leaves BatchNorm's running statistics
with each agent, although they belong to the shared base layers (PFLlib); here tracked statistics
belong to their layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from nufed.algorithms.partial import PrivatePart
from nufed.algorithms.protocol import Notes


@dataclass(frozen=True, kw_only=True)
class FedPer(PrivatePart):
    """FedPer: a private head on a shared body, trained together (Arivazhagan et al., 2019).

    Args:
        private: W_P, the personalisation layers.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η, ``local_steps`` τ.
    """

    notes: ClassVar[Notes] = replace(PrivatePart.notes, averaging="samples")
