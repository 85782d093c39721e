"""FedBN: normalisation layers stay with the agent (Li et al., 2021).

FedAvg, except that the affine parameters and the running statistics of normalisation layers are
private:

    agent:   τ times:  w ← w − η∇f_i(w); running statistics follow the batches
    server:  all but normalisation layers ← mean over agents.

The server holds and broadcasts the other layers; normalisation layers stay with the agent and are
never sent. The personal model has the server's latest layers and the agent's own normalisation. A
newcomer trains the initial normalisation layers, statistics included, for a round's local steps
with all else fixed. ``optimizer`` drives all of these steps; it never changes statistics. A model
with BatchNorm needs ``model.running_stats = "tracked"``; with ``"frozen"`` only the affine
parameters are trained and private. GroupNorm and LayerNorm have no statistics. Without
normalisation layers it is FedAvg.

Known mistakes elsewhere: layers are found by ``"bn" in name`` (the authors' code, PFLlib), so that
those with other names, such as ``downsample.1`` of a ResNet, are averaged; only ``BatchNorm2d`` is
considered (FL-bench); running statistics are averaged, or reset, while affine parameters are
private.
"""

from __future__ import annotations

from dataclasses import dataclass

from nufed.algorithms.partial import PRIVATE, PrivatePart
from nufed.settings import setting


@dataclass(frozen=True, kw_only=True)
class FedBN(PrivatePart):
    """FedBN: normalisation layers are private, with their running statistics (Li et al., 2021).

    Args:
        private: the normalisation layers.
        others: as for :class:`LocalTraining`; ``meta_lr`` is η, ``local_steps`` τ.
    """

    private: str = setting("norm", PRIVATE)
