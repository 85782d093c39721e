"""Engines that run an Algorithm over agents on this machine."""

from nufed.simulation.batched import BatchedEngine
from nufed.simulation.direct import DirectEngine
from nufed.simulation.engine import Engine
from nufed.simulation.gram import GramEngine
from nufed.simulation.loop import Progress, run_round, train

__all__ = [
    "BatchedEngine",
    "DirectEngine",
    "Engine",
    "GramEngine",
    "Progress",
    "run_round",
    "train",
]
