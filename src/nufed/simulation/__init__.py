"""Engines that run an Algorithm over agents on this machine."""

from nufed.server import Progress
from nufed.simulation.batched import BatchedEngine
from nufed.simulation.choose import ENGINES, EngineName, Engines
from nufed.simulation.direct import DirectEngine
from nufed.simulation.engine import Engine
from nufed.simulation.faults import Faults
from nufed.simulation.gram import GramEngine
from nufed.simulation.loop import run_round, train
from nufed.simulation.processes import Workers, can_fork, usable_cores
from nufed.simulation.workers import WorkerEngine

__all__ = [
    "ENGINES",
    "BatchedEngine",
    "DirectEngine",
    "Engine",
    "EngineName",
    "Engines",
    "Faults",
    "GramEngine",
    "Progress",
    "WorkerEngine",
    "Workers",
    "can_fork",
    "run_round",
    "train",
    "usable_cores",
]
