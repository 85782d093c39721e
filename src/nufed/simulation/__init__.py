"""Engines that run an Algorithm over agents on this machine."""

from nufed.simulation.loop import Progress, run_round, train
from nufed.simulation.serial import DirectEngine

__all__ = ["DirectEngine", "Progress", "run_round", "train"]
