"""Runs a configuration: trains every method and seed, leaves a run directory and its report."""

from nufed.experiment.parts import Event
from nufed.experiment.run import resume, run

__all__ = ["Event", "resume", "run"]
