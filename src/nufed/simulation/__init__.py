"""Engines that run an Algorithm over agents on this machine."""

from nufed.server import Progress as Progress
from nufed.simulation.batched_engine import BatchedEngine as BatchedEngine
from nufed.simulation.choose_engine import ENGINES as ENGINES, GRAM as GRAM, Engines as Engines
from nufed.simulation.engine import (
    DirectEngine as DirectEngine,
    Engine as Engine,
    EngineName as EngineName,
)
from nufed.simulation.faults import Faults as Faults
from nufed.simulation.gram_engine import GramEngine as GramEngine
from nufed.simulation.loop import Training as Training, replay as replay, train as train
from nufed.simulation.ray_cluster import RayCluster as RayCluster, RayEngine as RayEngine
from nufed.simulation.worker_engine import WorkerEngine as WorkerEngine
from nufed.simulation.worker_pool import (
    Workers as Workers,
    device_count as device_count,
    start_method as start_method,
    unsendable as unsendable,
    usable_cores as usable_cores,
)
