"""Runs a configuration: trains every method and seed, writes a run directory and its report."""

from nufed.experiment.run_parts import Event
from nufed.experiment.runner import resume, run

__all__ = ["Event", "resume", "run"]
