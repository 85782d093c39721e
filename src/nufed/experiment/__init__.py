"""Runs a configuration: trains every method and seed, leaves a run directory and its report."""

from nufed.experiment.parts import Event
from nufed.experiment.run import run

__all__ = ["Event", "run"]
