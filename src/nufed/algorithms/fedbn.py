"""FedBN: normalisation layers stay with the agent (Li et al., 2021).

FedAvg but for the normalisation layers, of which both the affine parameters and the running
statistics are the agent's own:

    agent:   τ times:  w ← w − η∇f_i(w), running statistics following the batches
    server:  all but normalisation layers ← mean over agents.

The server holds the other layers, which travel; the agent keeps its normalisation layers, which
never do. The personal model has the server's latest layers and the agent's own normalisation. A
newcomer takes the initial normalisation layers and trains them, statistics included, for a round's
local steps with all else fixed. ``optimizer`` drives all of these steps; it never touches
statistics. A model with BatchNorm needs ``model.running_stats = "tracked"``; with ``"frozen"`` only
the affine parameters are trained and private. GroupNorm and LayerNorm have no statistics. Without
normalisation layers it is FedAvg.

Known mistakes elsewhere: layers are found by ``"bn" in name`` (the authors' code, PFLlib), which
averages those of other names, such as ``downsample.1`` of a ResNet; only ``BatchNorm2d`` counts
(FL-bench); running statistics are averaged, or reset, while affine parameters are private.
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
