"""Engines that run an Algorithm over agents on this machine."""

from nufed.server import Progress
from nufed.simulation.batched_engine import BatchedEngine
from nufed.simulation.choose_engine import ENGINES, GRAM, Engines
from nufed.simulation.direct_engine import DirectEngine
from nufed.simulation.engine import Engine, EngineName
from nufed.simulation.faults import Faults
from nufed.simulation.gram_engine import GramEngine
from nufed.simulation.loop import Training, replay, train
from nufed.simulation.ray_cluster import RayCluster, RayEngine
from nufed.simulation.worker_engine import WorkerEngine
from nufed.simulation.worker_pool import (
    Workers,
    device_count,
    start_method,
    unsendable,
    usable_cores,
)

__all__ = [
    "ENGINES",
    "GRAM",
    "BatchedEngine",
    "DirectEngine",
    "Engine",
    "EngineName",
    "Engines",
    "Faults",
    "GramEngine",
    "Progress",
    "RayCluster",
    "RayEngine",
    "Training",
    "WorkerEngine",
    "Workers",
    "device_count",
    "replay",
    "start_method",
    "train",
    "unsendable",
    "usable_cores",
]
